// The status page: asks the daemon for what is new, and hands it to the parts that draw.

import { NeedsToken, ask, now, token } from "./ask.js";
import { setDetail, tickDetail } from "./detail.js";
import { at, chip, entries, say } from "./dom.js";
import { setEngines } from "./engines.js";
import { setLeases, tickLeases } from "./leases.js";
import { drawThroughput, drawTotals } from "./overview.js";
import { setPeers } from "./peers.js";
import { setPlan } from "./plan.js";
import { beginTransfers, setTransfers, tickTransfers } from "./transfers.js";
import { span } from "./units.js";

const EVERY_MS = 2000, TICK_MS = 500;
const records = new Map();
let timer = 0, asking = false;

function ready(readiness) {
  at("ready").replaceWith(Object.assign(chip(readiness.ready ? "ready" : "not ready", readiness.ready ? "good" : "bad"), { id: "ready", role: "status" }));
  const reasons = readiness.reasons.join("\n");
  if (at("reasons").said !== reasons) {
    at("reasons").said = reasons;
    at("reasons").replaceChildren(...readiness.reasons.map((reason) => Object.assign(document.createElement("li"), { textContent: reason })));
  }
}

function facts(info) {
  at("facts").replaceChildren(...entries([
    ["peers reach", info.advertise], ["device", info.device], ["way", info.way + (info.strict ? ", strict" : "")], ["version", info.version],
    ["up", span(info.uptime_s * 1000)],
  ]));
  document.title = `kvferry ${info.advertise}`;
}

function draining(drain) {
  at("draining").hidden = !drain.draining;
  say("draining", drain.drained ? "drained" : `draining: ${drain.leases} leases, ${drain.transfers} transfers left`);
}

// What did not change stays the object that it was: nothing of it is drawn again.
function learn(list) {
  const known = new Set();
  for (const record of list) {
    record.said = JSON.stringify(record);
    if (records.get(record.transfer_id)?.said !== record.said) records.set(record.transfer_id, record);
    known.add(record.transfer_id);
  }
  for (const id of records.keys()) if (!known.has(id)) records.delete(id);
}

function route() {
  const [, name, value] = location.hash.match(/^#(transfer|plan)=(.*)$/) ?? [];
  const id = name === "transfer" ? decodeURIComponent(value) : "";
  setDetail(id, records.get(id) ?? null);
  if (name === "plan") setPlan(decodeURIComponent(value));
}

const PATHS = ["readyz", "v1/info", "v1/engines", "v1/transfers", "v1/leases", "v1/peers", "v1/drain"];

// Null where the daemon did not answer, or wants a token first; the page says so.
async function asked() {
  try {
    return await Promise.all(PATHS.map(ask));
  } catch (error) {
    if (error instanceof NeedsToken) askForToken();
    else {
      ready({ ready: false, reasons: [`The daemon does not answer (${error.message}). What is below is old.`] });
      document.body.classList.add("stale");
    }
    return null;
  }
}

function askForToken() {
  say("refused", token.get() ? "that token was not taken" : "");
  token.forget();
  at("login").hidden = false;
  at("content").hidden = true;
  at("token").focus();
}

function draw([readiness, info, { engines }, { transfers }, { leases }, { peers }, drain]) {
  learn(transfers);
  const all = [...records.values()];
  ready(readiness);
  facts(info);
  draining(drain);
  setTransfers(all);
  setLeases(leases);
  setPeers(peers, all);
  setEngines(engines);
  drawThroughput(all, now());
  drawTotals(all, leases, engines);
  at("content").hidden = false;
  at("login").hidden = true;
  document.body.classList.remove("stale");
  route();
}

async function look() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  const answers = await asked();
  asking = false;
  if (at("login").hidden || answers) timer = setTimeout(look, EVERY_MS);
  if (answers) draw(answers);
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(at("token").value.trim());
  at("token").value = "";
  look();
});
addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && location.hash) location.hash = "";
});
document.addEventListener("visibilitychange", look);
setInterval(() => {
  if (document.hidden) return;
  tickTransfers();
  tickLeases();
  tickDetail();
}, TICK_MS);
beginTransfers();
look();
