// The fleet page: a row for each pair of engines, what fails, what was slow, and every daemon.

import { ask } from "./ask.js";
import { at, chip, entries, keyed, make, say } from "./dom.js";
import { looking, shown } from "./look.js";
import { clock, count, plural, size, span } from "./units.js";

const EVERY_MS = 2000;
const host = (url) => url.replace(/^https?:\/\//, "");
const cell = (name, about, ...children) => {
  const element = make("td", about, ...children);
  if (name) element.dataset.name = name;
  return element;
};
const number = (name, value, tone = "") => cell(name, { class: `num ${tone}` }, value);
// A lease that failed here, unread, has no transfer.
const record = ({ url, transfer_id, request_id }) => make("a", { href: `${url}/#${transfer_id ? `transfer=${encodeURIComponent(transfer_id)}` : "leases"}` }, request_id);
const failed = (error) => error ? make("small", { class: "bad" }, `${error.code}: ${error.message}`) : null;

function drawPair(row, pair) {
  const waits = Object.entries(pair.waits).map(([what, many]) => `${count(many)} for ${what}`).join(", ");
  const silent = pair.failing.length ? make("small", { class: "bad" }, `no answer from rank ${pair.failing.join(", ")}`) : null;
  row.replaceChildren(
    cell("", { class: "all" }, make("b", {}, pair.source_engine_id || "order without a source"), make("small", {}, pair.source ? host(pair.source) : "none of this proxy's prefill engines"), silent),
    cell("", { class: "all" }, make("b", {}, pair.engine_id), make("small", {}, host(pair.destination)), failed(pair.error)),
    number("under way", [count(pair.under_way), waits ? make("small", {}, waits) : null]),
    number("done", count(pair.done)), number("failed", [count(pair.failed), pair.aborted ? make("small", {}, `${count(pair.aborted)} aborted`) : null], pair.failed ? "bad" : ""),
    number("moved", size(pair.bytes)), number("p50", span(pair.p50_ms)), number("p99", span(pair.p99_ms)), cell("path", {}, pair.path || "–"));
}

function drawFailure(row, each) {
  row.replaceChildren(cell("", { class: "all" }, record(each), make("small", {}, `${each.source_engine_id} to ${each.engine_id}`)),
    cell("", { class: "all" }, make("b", { class: "bad" }, each.error?.code ?? "failed"), make("small", {}, each.error?.message ?? "")),
    number("", clock(each.ended_at * 1000)));
}

function drawSlow(row, each) {
  row.replaceChildren(cell("", { class: "all" }, record(each), make("small", {}, `${each.source_engine_id} to ${each.engine_id}`)),
    number("", span(each.took_ms)), cell("", {}, each.longest ? `${each.longest} ${span(each.longest_ms)}` : ""),
    number("", clock(each.ended_at * 1000)));
}

const TONES = ["bad", "wait", "good"];
const tone = (daemon) => daemon.error || !daemon.ready ? "bad" : daemon.state === "degraded" ? "wait" : "good";
const worst = (daemon) => TONES.indexOf(tone(daemon));
function lately({ url, failed_lately, error }) {
  if (!failed_lately || error) return null;
  const { failed, last } = failed_lately;
  return make("small", {}, `${plural(failed, "failure")} in 5 min, the last `, record({ url, ...last }), `: ${last.error.code}: ${last.error.message}`);
}
function drawDaemon(row, daemon) {
  const word = daemon.error?.code ?? daemon.state ?? "not ready";
  const why = daemon.error ? [daemon.error.message] : [...daemon.reasons, ...daemon.warnings];
  row.replaceChildren(cell("", { class: "all" }, make("a", { href: `${daemon.url}/` }, host(daemon.url)), make("small", {}, daemon.version ? `kvferry ${daemon.version}` : "")),
    cell("", {}, daemon.role, make("small", {}, `rank ${daemon.rank} of ${host(daemon.engine)}`)), cell("engine", {}, daemon.engine_ids.join(", ") || "–"),
    cell("", { class: "all" }, chip(word, tone(daemon)), ...why.map((line) => make("small", { class: daemon.error || !daemon.ready ? "bad" : "" }, line)), lately(daemon)));
}

function list(id, rows, key, draw) {
  keyed(at(id), rows, key, () => make("tr", {}), draw);
  const none = at(`no-${id}`);
  if (none) none.hidden = rows.length > 0;
}

function draw({ daemons, pairs, failures, slow, asked_at }) {
  const [bad, degraded] = TONES.map((each) => daemons.filter((daemon) => tone(daemon) === each));
  const silent = new Set([...pairs.flatMap((pair) => pair.failing.map((rank) => `${pair.source_engine_id} ${rank}`)), ...daemons.flatMap(({ unmet }) => unmet.map(({ address }) => address))]);
  const harmed = pairs.filter((pair) => pair.failed);
  const wrong = [bad.length && `${plural(bad.length, "daemon")} not ready`, degraded.length && `${count(degraded.length)} degraded`,
    silent.size && `${plural(silent.size, "peer")} without an answer`, harmed.length && `${plural(harmed.length, "pair")} with failures`].filter(Boolean);
  at("state").className = `chip ${bad.length ? "bad" : wrong.length ? "wait" : "good"}`;
  say("state", wrong.join(", ") || "all well");
  at("facts").replaceChildren(...entries([["daemons", count(daemons.length)], ["pairs", count(pairs.length)], ["under way", count(pairs.reduce((sum, pair) => sum + pair.under_way, 0))], ["asked", clock(asked_at * 1000)]]));
  at("said").replaceChildren();
  say("pairs-said", "of the last 5 minutes");
  say("daemons-said", bad.length ? `${count(bad.length)} of ${count(daemons.length)} cannot be used` : "");
  list("pairs", pairs, (pair) => `${pair.source_engine_id}\n${pair.destination}\n${pair.engine_id}`, drawPair);
  list("failures", failures, (each) => each.url + each.transfer_id, drawFailure);
  list("slow", slow, (each) => each.url + each.transfer_id, drawSlow);
  list("daemons", daemons.toSorted((a, b) => worst(a) - worst(b)), (daemon) => `${daemon.role} ${daemon.url}`, drawDaemon);
  shown();
}

function lost(error) {
  say("state", "no answer");
  at("state").className = "chip bad";
  at("said").replaceChildren(make("li", {}, `The proxy does not answer (${error.message}). What is below is old.`));
}

looking(async () => draw(await ask("../v1/fleet")), lost, EVERY_MS)();
