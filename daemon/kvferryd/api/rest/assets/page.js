// The status page: asks the daemon for what is new, and hands it to the parts that draw.

import { ask } from "./ask.js";
import { setDetail, tickDetail } from "./detail.js";
import { at, entries, make, say } from "./dom.js";
import { setEngines } from "./engines.js";
import { setLeases, tickLeases } from "./leases.js";
import { beginHistory, lookAtHistory } from "./history.js";
import { looking, shown } from "./look.js";
import { drawTotals } from "./overview.js";
import { setPeers, tickPeers } from "./peers.js";
import { setPlan } from "./plan.js";
import { over } from "./record.js";
import { beginTransfers, setTransfers, tickTransfers } from "./transfers.js";
import { plural, span } from "./units.js";

// A harm is drawn within 2 s of the first failure: one passes until the next look, one is left for its answers.
const EVERY_MS = 1000, SECTIONS_MS = 4000, TICK_MS = 500, SLOW_MS = 30000, FIRST = 300, MOST = 1000, KEPT = 3000;
const STATES = { ready: "good", degraded: "wait", "not ready": "bad" };
const records = new Map();
const inView = new Set();
let cursor = "", heldEngines = "", wrong = "", infoAt = -Infinity, sectionsAt = -Infinity;

function ready({ state, reasons, warnings }) {
  at("ready").className = `chip ${STATES[state]}`;
  say("ready", state);
  for (const [id, list] of [["reasons", reasons], ["warnings", warnings ?? []]])
    if (at(id).said !== list.join("\n")) {
      at(id).said = list.join("\n");
      at(id).replaceChildren(...list.map((text) => make("li", {}, text)));
    }
}

function failing(lately) {
  at("failing").hidden = !lately;
  if (!lately) return;
  say("failing", `${plural(lately.failed, "failure")} in 5 min`);
  at("failing").href = lately.last.transfer_id ? `#transfer=${encodeURIComponent(lately.last.transfer_id)}` : "#leases";
  at("failing").title = `request ${lately.last.request_id}: ${lately.last.error.message}`;
}

function facts(info) {
  at("facts").replaceChildren(...entries([
    ["peers reach", info.advertise], ["device", info.device], ["way", info.way + (info.strict ? ", strict" : "")], ["version", info.version],
    ["up", span(info.uptime_s * 1000)],
  ]));
  document.title = `kvferry ${info.advertise}`;
}

// What has changed since the last answer. A record that has ended never changes again; one under way that is not in
// the answer is no more. The oldest are let go.
function learn({ transfers, cursor: next, whole }) {
  if (whole) records.clear();
  else if (transfers.length < MOST) {
    const told = new Set(transfers.map((record) => record.transfer_id));
    for (const record of records.values()) if (!over(record) && !told.has(record.transfer_id)) records.delete(record.transfer_id);
  }
  for (const record of transfers) records.set(record.transfer_id, record);
  for (const record of records.values()) {
    if (records.size <= KEPT) break;
    if (over(record)) records.delete(record.transfer_id);
  }
  cursor = next;
}

// A record that the tab has not loaded, of which a link speaks: its id, and what the daemon answers; null: it has none.
let asked = "", answered;

function found(id) {
  if (records.has(id) || !id) return records.get(id) ?? null;
  if (asked !== id) {
    [asked, answered] = [id, undefined];
    ask(`v1/transfers/${encodeURIComponent(id)}`).catch(() => null).then((record) => {
      if (asked !== id) return;
      answered = record;
      route();
    });
  }
  return answered;
}

function route() {
  const [, name, value] = location.hash.match(/^#(transfer|plan)=(.*)$/) ?? [];
  const id = name === "transfer" ? decodeURIComponent(value) : "";
  setDetail(id, found(id), [...records.values()]);
  if (name === "plan") setPlan(decodeURIComponent(value));
}

// Manifests may be large: they are asked for when an engine has come or gone, and somebody looks.
async function lookAtEngines() {
  const { engines } = await ask("v1/engines?manifests=false"), held = JSON.stringify(engines);
  if (held !== heldEngines) setEngines((await ask("v1/engines")).engines);
  heldEngines = held;
}

const SECTIONS = {
  "all-peers": async () => setPeers(await ask("v1/peers")),
  leases: async () => setLeases(await ask("v1/leases?ended=25")),
  engines: lookAtEngines,
};

async function lookAtAll() {
  const [transfers, totals] = await Promise.all([ask(`v1/transfers?${cursor ? `since=${cursor}&limit=${MOST}` : `limit=${FIRST}`}`), ask("v1/totals")]);
  const { readiness, failed_lately, leases } = totals, { reasons } = readiness;
  if (performance.now() - infoAt > SLOW_MS) {
    facts(await ask("v1/info"));
    infoAt = performance.now();
  }
  const drain = reasons.includes("draining") ? await ask("v1/drain") : null;
  at("draining").hidden = !drain;
  if (drain) say("draining", drain.drained ? "drained" : `draining: ${drain.leases} leases, ${drain.transfers} transfers left`);
  learn(transfers);
  ready(readiness);
  failing(failed_lately);
  const all = [...records.values()];
  setTransfers(all);
  drawTotals(totals, all);
  shown();
  route();
  await lookAtHistory();
  // Sections say at once what has gone wrong.
  const now = JSON.stringify([readiness, failed_lately, leases.expired, leases.revoked]);
  if (now === wrong && performance.now() - sectionsAt < SECTIONS_MS) return;
  [wrong, sectionsAt] = [now, performance.now()];
  await Promise.all([...inView].map((id) => SECTIONS[id]()));
}

const look = looking(lookAtAll, (error) =>
  ready({ state: "not ready", reasons: [`The daemon does not answer (${error.message}). What is below is old.`] }), EVERY_MS);

addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && location.hash) location.hash = "";
});
setInterval(() => {
  if (document.hidden) return;
  tickTransfers();
  tickLeases();
  tickPeers();
  tickDetail();
}, TICK_MS);
beginTransfers();
beginHistory();
// A section is asked for while it is seen.
const seeing = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) isIntersecting ? inView.add(target.id) : inView.delete(target.id);
  if (!seen.some(({ isIntersecting }) => isIntersecting)) return;
  sectionsAt = -Infinity;
  if (!at("content").hidden) look();
}, { rootMargin: "200px" });
for (const id of Object.keys(SECTIONS)) seeing.observe(at(id));
look();
