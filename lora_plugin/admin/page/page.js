// The operator's page: reads the admin endpoint that serves it, and calls it on a click.

const REFRESH_MS = 2000;
const PAGE_SIZE = 25;
const MAX_EVENTS = 100;
const TOKEN = "lora-plugin-token";

const byId = (id) => document.getElementById(id);
const view = { query: "", state: "", sort: "name", offset: 0 };

class Problem extends Error {
  constructor(status, body) {
    const parts = [body.detail ?? `the endpoint answered ${status}`];
    if (body.expected) parts.push(`expected ${body.expected}`);
    if (body.found) parts.push(`found ${body.found}`);
    if (body.hint) parts.push(body.hint);
    super(parts.join("; "));
    this.status = status;
  }
}

async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  if (!response.ok) {
    throw new Problem(response.status, await response.json().catch(() => ({})));
  }
  return response;
}

const json = async (path, options) => (await call(path, options)).json();
const adapterPath = (name) => `/v1/adapters/${encodeURIComponent(name)}`;

// What may be done with an adapter: label, when, how, and what to ask before.
const ACTIONS = [
  {
    label: "Load",
    fits: (a) => a.state === "listed" && a.residency.host < a.residency.engines,
    run: (name) => call(adapterPath(name), { method: "PUT" }),
  },
  {
    label: "Pin",
    fits: (a) => a.state === "listed" && !a.pinned,
    run: (name) => call(`${adapterPath(name)}/pin`, { method: "POST" }),
  },
  {
    label: "Unpin",
    fits: (a) => a.pinned,
    run: (name) => call(`${adapterPath(name)}/unpin`, { method: "POST" }),
  },
  {
    label: "Evict",
    fits: (a) => a.state === "listed" && (a.residency.host > 0 || a.residency.device > 0),
    run: (name) => call(`${adapterPath(name)}/evict`, { method: "POST" }),
    question: (name) => `Evict “${name}” from memory? The next request loads it again.`,
  },
  {
    label: "Reload",
    fits: (a) => ["rejected", "unloaded"].includes(a.state),
    run: (name) => call(`${adapterPath(name)}/reload`, { method: "POST" }),
  },
  {
    label: "Unload",
    danger: true,
    fits: (a) => a.state === "listed",
    run: (name) => call(adapterPath(name), { method: "DELETE" }),
    question: (name) => `Unload “${name}”? It is not served until its files change. The files stay.`,
  },
];

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function ago(seconds) {
  if (seconds === null) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

// The same colour for the same name, light enough for dark text.
function colour(name) {
  let hash = 0;
  for (const character of name) hash = Math.imul(hash ^ character.codePointAt(0), 0x9e3779b1) >>> 0;
  return `hsl(${(hash >>> 8) % 360} 65% 72%)`;
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function say(text) {
  byId("message").textContent = text;
  byId("message").hidden = !text;
}

function confirmed(question, verb) {
  const dialog = byId("confirm");
  byId("confirm-text").textContent = question;
  byId("confirm-yes").textContent = verb;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

async function act(action, name) {
  if (action.question && !(await confirmed(action.question(name), action.label))) return;
  try {
    await action.run(name);
    say("");
  } catch (error) {
    say(`${action.label} ${name}: ${error.message}`);
  }
  await refresh();
}

function places(adapter) {
  const { host, device, engines } = adapter.residency;
  const shown = [];
  if (adapter.residency.disk) shown.push("disk");
  if (host) shown.push(engines > 1 ? `host ${host}/${engines}` : "host");
  if (device) shown.push(engines > 1 ? `device ${device}/${engines}` : "device");
  return shown;
}

function row(adapter) {
  const made = byId("row").content.cloneNode(true);
  const put = (selector, text) => {
    made.querySelector(selector).textContent = text;
  };
  made.querySelector("tr").dataset.name = adapter.name;
  put(".name", adapter.name);
  made.querySelector(".pinned").hidden = !adapter.pinned;
  put(".state", adapter.state);
  made.querySelector(".state").classList.add(adapter.state);
  put(".version", adapter.version?.slice(0, 12) ?? "–");
  put(".rank", adapter.rank ?? "–");
  put(".requests", adapter.requests);
  put(".used", ago(adapter.last_used_seconds_ago));
  const size = adapter.packed_bytes || adapter.nbytes;
  put(".size", size ? bytes(size) : "–");
  made.querySelector(".where").append(...places(adapter).map((place) => element("span", place)));
  for (const action of ACTIONS.filter((each) => each.fits(adapter))) {
    const button = element("button", action.label, action.danger && "danger");
    button.type = "button";
    button.ariaLabel = `${action.label} ${adapter.name}`;
    button.addEventListener("click", () => act(action, adapter.name));
    made.querySelector(".actions").append(button);
  }
  if (adapter.reason) made.append(reasonRow(adapter.reason));
  if (adapter.warnings.length) made.append(warningRow(adapter.warnings));
  return made;
}

function warningRow(warnings) {
  const made = element("tr", undefined, "warning");
  const cell = made.appendChild(document.createElement("td"));
  cell.colSpan = 9;
  cell.append(warnings.join("; "));
  return made;
}

function reasonRow(reason) {
  const made = element("tr", undefined, "reason");
  const cell = made.appendChild(document.createElement("td"));
  cell.colSpan = 9;
  const parts = [`${reason.message} [${reason.code}]`];
  if (reason.expected) parts.push(`expected ${reason.expected}`);
  if (reason.found) parts.push(`found ${reason.found}`);
  cell.append(parts.join("; "));
  if (reason.hint) cell.append(" ", element("span", `Hint: ${reason.hint}`, "hint"));
  return made;
}

// Rows are made anew; what had the focus gets it back.
function showAdapters(page) {
  const focused = document.activeElement?.ariaLabel;
  const body = byId("adapters");
  body.replaceChildren(...page.adapters.map(row));
  if (focused) {
    [...body.querySelectorAll("button")].find((button) => button.ariaLabel === focused)?.focus();
  }
  const last = page.offset + page.adapters.length;
  byId("count").textContent = page.total
    ? `${page.offset + 1} to ${last} of ${page.total}`
    : "no adapter";
  byId("previous").disabled = page.offset === 0;
  byId("next").disabled = last >= page.total;
}

function slab(engine, index) {
  const made = element("div", undefined, "slab");
  made.setAttribute("role", "list");
  made.ariaLabel = `Slab ${index}, ${engine.slab_rows} rows`;
  for (const extent of engine.extents.filter((each) => each.slab === index)) {
    const bar = element("div", `${extent.adapter}${extent.pinned ? " (pinned)" : ""}`, "extent");
    const start = extent.first_row % engine.slab_rows;
    bar.setAttribute("role", "listitem");
    bar.title = `${extent.adapter}@${extent.version.slice(0, 12)}: rows ${start} to ${start + extent.rows - 1}, ${extent.requests} requests`;
    bar.style.left = `${(100 * start) / engine.slab_rows}%`;
    bar.style.width = `${(100 * extent.rows) / engine.slab_rows}%`;
    bar.style.background = colour(extent.adapter);
    made.append(bar);
  }
  return made;
}

function engineView(engine, index, count) {
  const made = document.createElement("div");
  if (count > 1) made.append(element("h3", `Engine ${index}`));
  const used = engine.rows_total - engine.rows_free;
  const facts = [`device: ${used} of ${engine.rows_total} rows in ${engine.slabs} slabs`];
  if (engine.waiting_requests) {
    facts.push(`${engine.waiting_requests} requests wait for room, the oldest for ${engine.longest_wait_seconds.toFixed(1)} s`);
  }
  const { hits, misses, loads } = engine.counters;
  facts.push(`${loads} loads, ${hits} hits, ${misses} misses`);
  made.append(element("p", facts.join("; "), "facts"));
  for (let number = 0; number < engine.slabs; number += 1) made.append(slab(engine, number));
  const host = element("p", "host cache: ", "facts");
  const bar = document.createElement("progress");
  bar.max = engine.host_budget_bytes;
  bar.value = engine.host_bytes;
  bar.ariaLabel = "host cache in use";
  host.append(bar, ` ${bytes(engine.host_bytes)} of ${bytes(engine.host_budget_bytes)}`);
  made.append(host);
  return made;
}

function showPool(pool) {
  byId("pool").replaceChildren(...pool.engines.map((engine, i) => engineView(engine, i, pool.engines.length)));
}

function connected(text, lost = false) {
  byId("connection").textContent = text;
  byId("connection").classList.toggle("lost", lost);
}

let refreshing = null;

// One refresh at a time; one asked for meanwhile follows it.
async function refresh() {
  if (refreshing) {
    refreshing.again = true;
    return;
  }
  refreshing = { again: false };
  try {
    const filters = new URLSearchParams({ sort: view.sort, limit: PAGE_SIZE, offset: view.offset });
    if (view.query) filters.set("q", view.query);
    if (view.state) filters.set("state", view.state);
    const [page, pool] = await Promise.all([json(`/v1/adapters?${filters}`), json("/v1/pool")]);
    showAdapters(page);
    showPool(pool);
    connected("connected");
  } catch (error) {
    connected(error instanceof Problem ? error.message : "no answer from the server", true);
    if (error.status === 401) askToken();
  } finally {
    const { again } = refreshing;
    refreshing = null;
    if (again) refresh();
  }
}

function askToken() {
  const dialog = byId("token-dialog");
  if (dialog.open || dialog.dataset.refused) return;
  dialog.returnValue = "no";
  dialog.showModal();
}

function showEvent(event) {
  const made = document.createElement("li");
  const time = element("time", new Date(event.time * 1000).toLocaleTimeString());
  const version = event.version ? ` ${event.version.slice(0, 12)}` : "";
  const reason = event.reason ? `: ${event.reason.message} [${event.reason.code}]` : "";
  made.append(time, `${event.kind} `, element("strong", event.name), `${version}${reason}`);
  byId("events").prepend(made);
  while (byId("events").children.length > MAX_EVENTS) byId("events").lastChild.remove();
}

// By fetch, not EventSource: that one cannot send the token.
async function follow() {
  let last = "0";
  for (;;) {
    try {
      const response = await call(`/v1/events?after=${encodeURIComponent(last)}`);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (text + value).split("\n\n");
        text = blocks.pop();
        for (const block of blocks) last = told(block) ?? last;
      }
    } catch {
      // The next refresh says what is wrong; here it is only tried again.
    }
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

function told(block) {
  const fields = Object.fromEntries(
    block.split("\n").filter((line) => !line.startsWith(":")).map((line) => line.split(/: (.*)/s, 2)),
  );
  if (!fields.id) return null;
  if (fields.event !== "reset") showEvent(JSON.parse(fields.data));
  refresh();
  return fields.id;
}

function listen() {
  let typing;
  byId("search").addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      view.query = event.target.value.trim();
      view.offset = 0;
      refresh();
    }, 150);
  });
  byId("state").addEventListener("change", (event) => {
    view.state = event.target.value;
    view.offset = 0;
    refresh();
  });
  for (const button of document.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      view.sort = button.dataset.sort;
      view.offset = 0;
      for (const head of document.querySelectorAll("th[aria-sort]")) head.ariaSort = "none";
      button.parentElement.ariaSort = view.sort === "name" ? "ascending" : "descending";
      refresh();
    });
  }
  byId("previous").addEventListener("click", () => {
    view.offset = Math.max(0, view.offset - PAGE_SIZE);
    refresh();
  });
  byId("next").addEventListener("click", () => {
    view.offset += PAGE_SIZE;
    refresh();
  });
  const dialog = byId("token-dialog");
  byId("token-button").addEventListener("click", () => {
    delete dialog.dataset.refused;
    dialog.returnValue = "no";
    dialog.showModal();
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "yes") sessionStorage.setItem(TOKEN, byId("token").value);
    // Whoever closed it is not asked again and again.
    else dialog.dataset.refused = "yes";
    byId("token").value = "";
    refresh();
  });
}

listen();
refresh();
follow();
setInterval(() => {
  if (!document.hidden) refresh();
}, REFRESH_MS);
