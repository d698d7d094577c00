"""A worker's memory: adapters read into the host's, copied to the device's."""
