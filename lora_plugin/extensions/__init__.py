"""Where the core calls the hooks: one module for each place."""
