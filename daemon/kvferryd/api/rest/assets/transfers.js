// The table of transfers: search, states, sorting; a row opens the detail. Equal failures are one row, which opens them.

import { at, chip, keyed, make, say } from "./dom.js";
import { PHASES, ageMs, lasted, matches, over, phases, sum } from "./record.js";
import { clock, count, plural, rate, size, span } from "./units.js";
import { now } from "./ask.js";

const STEP = 50;
const SHOWN = { all: () => true, live: (record) => !over(record), done: (record) => record.state === "done",
  failed: (record) => record.state === "failed", aborted: (record) => record.state === "aborted" };
// name, heading, what is sorted by, classes of its cells
const COLUMNS = [
  ["time", "started", (record) => record.created_at, ""],
  ["state", "state", (record) => record.state, ""],
  ["request", "request", (record) => record.request_id, ""],
  ["route", "from → to", (record) => `${record.source?.engine_id ?? ""} ${record.engine_id}`, ""],
  ["path", "path", (record) => `${record.path} ${record.transport}`, ""],
  ["bytes", "bytes", (record) => record.bytes, "num"],
  ["rate", "rate", (record) => record.bytes_per_s, "num"],
  ["phases", "phases", null, ""],
  ["total", "time", (record) => lasted(record, now()), "num"],
];
const chosen = { words: [], show: "all", by: "time", down: true, most: STEP };
let records = [], ticking = [];
const opened = new Set();

export function phaseBar(spent) {
  const total = sum(spent);
  const bar = make("span", { class: "bar", title: PHASES.filter((name) => spent[name]).map((name) => `${name} ${span(spent[name])}`).join(", ") });
  for (const name of PHASES) if (spent[name] > 0) {
    const part = make("i", { class: name });
    part.style.flexGrow = spent[name] / total;
    bar.append(part);
  }
  return bar;
}

// What failed alike: by one code, between the same two engines. The last line says how, for the newest.
const alike = (record) => record.state === "failed" && record.error
  ? [record.error.code, record.source?.engine_id, record.source?.address, record.engine_id].join("\n") : null;

// Rows in the order of the records: each is a record, or stands for all that failed alike, where the first of them is.
function folded(listed) {
  const groups = Map.groupBy(listed, alike), told = new Set(), rows = [];
  for (const record of listed) {
    const key = alike(record), group = key === null ? [record] : groups.get(key);
    if (group.length < 2) rows.push({ record });
    else if (!told.has(key)) {
      told.add(key);
      const newest = group.reduce((a, b) => b.created_at > a.created_at ? b : a), since = Math.min(...group.map((each) => each.created_at));
      rows.push({ record: newest, key, times: group.length, since, open: opened.has(key) });
      if (opened.has(key)) rows.push(...group.map((each) => ({ record: each, within: true })));
    }
  }
  return rows;
}

function create({ record, key }) {
  const parts = Object.fromEntries(COLUMNS.map(([name, , , classes]) => [name, make("td", { class: `${name} ${classes}` })]));
  const link = key ? make("button", { type: "button" }) : make("a", { href: `#transfer=${encodeURIComponent(record.transfer_id)}` }, record.request_id);
  if (key) link.addEventListener("click", () => {
    opened.has(key) ? opened.delete(key) : opened.add(key);
    show();
  });
  const why = make("p", { class: "why", hidden: true });
  parts.request.append(link, why);
  return Object.assign(make("tr", {}, Object.values(parts)), { parts, link, why });
}

function draw(row, { record, key, times, since, open, within }) {
  const { parts, why, link } = row;
  row.className = `${record.state} ${over(record) ? "" : "live"} ${record.bytes && !key ? "" : "nothing"} ${key ? "alike" : ""} ${within ? "within" : ""}`;
  parts.time.replaceChildren(make("time", { dateTime: new Date(record.created_at * 1000).toISOString() }, clock(record.created_at * 1000)));
  parts.state.replaceChildren(chip(record.state), make("small", {}, record.waits_for ? ` for ${record.waits_for}` : ""));
  parts.route.replaceChildren(make("span", {}, record.source?.engine_id ?? "–"), make("b", {}, " → "), make("span", {}, record.engine_id));
  why.hidden = !record.error;
  if (record.error) why.replaceChildren(make("b", {}, record.error.code), ` ${record.error.message}`);
  if (key) {
    link.replaceChildren(`${plural(times, "request")} failed alike`, make("small", {}, open ? " close" : " open"));
    link.ariaExpanded = open;
    parts.time.append(make("small", {}, `since ${clock(since * 1000)}`));
    return;
  }
  parts.path.replaceChildren(record.path || "–", make("small", {}, record.transport ? ` ${record.transport}` : ""));
  parts.bytes.replaceChildren(record.bytes ? size(record.bytes) : "–");
  parts.rate.replaceChildren(rate(record.bytes_per_s));
  age(row, record);
}

function age(row, record) {
  row.parts.phases.replaceChildren(phaseBar(phases(record, ageMs(record, now()))),
    make("small", {}, record.ranks.length > 1 && over(record) ? `rank ${record.slowest_rank}` : ""));
  row.parts.total.replaceChildren(span(lasted(record, now())));
}

function show() {
  const found = records.filter((record) => matches(record, chosen.words));
  const listed = found.filter(SHOWN[chosen.show]);
  const by = COLUMNS.find(([name]) => name === chosen.by)[2], sign = chosen.down ? -1 : 1;
  const keys = new Map(listed.map((record) => [record, by(record)]));
  const compare = (a, b) => a < b ? -1 : a > b ? 1 : 0;
  listed.sort((a, b) => sign * compare(keys.get(a), keys.get(b)) || b.created_at - a.created_at);
  const rows = folded(listed), visible = rows.slice(0, chosen.most);
  keyed(at("rows"), visible, ({ record, key }) => key ?? record.transfer_id, create, draw);
  ticking = visible.map(({ record }) => record).filter((record) => !over(record));
  for (const button of at("states").children) {
    const number = found.filter(SHOWN[button.value]).length;
    button.setAttribute("aria-pressed", button.value === chosen.show);
    button.hidden = !number && button.value !== "all" && button.value !== chosen.show;
    button.lastChild.textContent = count(number);
  }
  for (const head of at("columns").children) head.ariaSort = head.dataset.name !== chosen.by ? "none" : chosen.down ? "descending" : "ascending";
  at("sorting").value = `${chosen.by} ${chosen.down ? "down" : "up"}`;
  const rest = rows.length - visible.length;
  at("more").hidden = rest <= 0;
  say("more", `${count(rest)} more`);
  at("transfers").classList.toggle("bare", !records.length);
  at("no-transfers").hidden = listed.length > 0;
  say("no-transfers", records.length ? "None of the transfers fits." :
    "No transfers yet. A router's order (POST /v1/transfers) or an engine's receive makes one.");
}

export function setTransfers(all) {
  records = all;
  show();
}

// What grows while nothing is heard: the time of live transfers.
export function tickTransfers() {
  const rows = at("rows").kept;
  for (const record of ticking) {
    const row = rows?.get(record.transfer_id);
    if (row) age(row, record);
  }
}

export function beginTransfers() {
  at("columns").append(...COLUMNS.map(([name, heading, by, classes]) => {
    const head = make("th", { class: `${name} ${classes}`, scope: "col" }, by ? make("button", { type: "button" }, heading) : heading);
    head.dataset.name = name;
    return head;
  }));
  at("columns").addEventListener("click", (event) => {
    const name = event.target.closest("button")?.parentElement.dataset.name;
    if (!name) return;
    chosen.down = chosen.by === name ? !chosen.down : ["time", "bytes", "rate", "total"].includes(name);
    chosen.by = name;
    show();
  });
  at("sorting").append(...COLUMNS.filter(([, , by]) => by).flatMap(([name, heading]) => [["down", "↓"], ["up", "↑"]].map(
    ([way, arrow]) => make("option", { value: `${name} ${way}` }, `${heading} ${arrow}`))));
  at("sorting").addEventListener("change", (event) => {
    const [by, way] = event.target.value.split(" ");
    Object.assign(chosen, { by, down: way === "down" });
    show();
  });
  at("states").append(...Object.keys(SHOWN).map((name) => make("button", { type: "button", value: name, class: name }, name, " ", make("small"))));
  at("failing").addEventListener("click", () => {
    if (at("failing").hash === "#leases") return;
    at("states").querySelector(".failed").click();
    at("transfers").scrollIntoView();
  });
  at("states").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    chosen.show = button.value;
    chosen.most = STEP;
    show();
  });
  at("search").addEventListener("input", (event) => {
    chosen.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    chosen.most = STEP;
    show();
  });
  at("more").addEventListener("click", () => {
    chosen.most += 2 * STEP;
    show();
  });
  at("rows").addEventListener("click", (event) => {
    if (!event.target.closest("a, button") && !String(getSelection())) event.target.closest("tr")?.link.click();
  });
}
