// One transfer: what it was, why it failed, its ranks on one timeline.

import { at, chip, entries, make } from "./dom.js";
import { PHASES, ageMs, isSlowest, lasted, over, phases, sum, waitedForTheSame } from "./record.js";
import { sourceHalf } from "./source.js";
import { timeline } from "./timeline.js";
import { count, moment, rate, size, span } from "./units.js";
import { now } from "./ask.js";

const WAITS = {
  order: "the router's order", reservation: "the engine's blocks", handshake: "the handshake with the source", lease: "the source's daemon",
  publish: "the source engine to publish", fence: "the source engine's fence", slot: "a slot of the own arena", pack: "the source's daemon to pack", rank: "another rank",
};
const NAMED = 5;
let record = null, all = [], shown = "";

const mono = (text) => text ? make("code", {}, text) : "";
const place = (engineId, ...more) => engineId ? make("span", {}, mono(engineId), ...more.filter(Boolean).map((each) => make("small", {}, ` ${each}`))) : "";

export function problem(error) {
  return make("div", { class: "problem" },
    make("b", {}, error.code), make("p", {}, error.message),
    error.field ? make("p", {}, make("small", {}, `${error.field} = `), mono(error.value)) : null,
    error.remedy ? make("p", { class: "remedy" }, error.remedy) : null);
}

function lane(share, age) {
  const spent = phases(share, age), parts = [];
  let at = 0;
  for (const name of PHASES) if (spent[name] > 0) {
    parts.push([name, at, at + spent[name], `${name} ${span(spent[name])}`]);
    at += spent[name];
  }
  return { name: `rank ${share.rank}`, parts, error: share.error?.code, state: share.state };
}

function ranks(shares, age) {
  const heads = ["rank", "state", "bytes", "runs", "rate", ...PHASES, "time"];
  const cell = (name, ...children) => {
    const made = make("td", { class: name === "rank" || name === "state" ? "" : "num" }, ...children);
    made.dataset.name = name;
    return made;
  };
  return make("table", { class: "cells" },
    make("thead", {}, make("tr", {}, heads.map((name) => make("th", { scope: "col", class: name === "rank" || name === "state" ? "" : "num" }, name)))),
    make("tbody", {}, shares.map((share) => {
      const spent = phases(share, age);
      return make("tr", { class: isSlowest(share, record) ? "slow" : "" },
        cell("rank", share.rank), cell("state", chip(share.state)), cell("bytes", share.bytes ? size(share.bytes) : "–"),
        cell("runs", share.descriptors ? count(share.descriptors) : "–"), cell("rate", rate(share.bytes_per_s)),
        PHASES.map((name) => cell(name, spent[name] ? span(spent[name]) : "–")),
        cell("time", make("b", {}, span(sum(spent)))));
    })));
}

// The parts of a phase that the daemon tells apart.
function within(phasesMs) {
  const names = { waiting_order: "waited for the order", waiting_reservation: "waited for blocks", waiting_publish: "waited for the publish", moving: "bytes moved for", nixl: "of it in NIXL" };
  return Object.entries(names).filter(([name]) => phasesMs[name]).map(([name, words]) => [words, span(phasesMs[name])]);
}

function beside() {
  const others = waitedForTheSame(record, all), more = others.length - NAMED;
  return others.length ? make("p", { class: "soft others" }, "Others waited for the same in that second: ",
    ...others.slice(0, NAMED).flatMap((other, i) => [i ? ", " : "", make("a", { href: `#transfer=${encodeURIComponent(other.transfer_id)}` }, other.request_id)]),
    more > 0 ? ` and ${count(more)} more` : "") : null;
}

function draw() {
  const age = ageMs(record, now()), shares = record.ranks, several = shares.length > 1;
  return [
    make("div", { class: "head" }, chip(record.state), make("h2", {}, record.request_id)),
    record.waits_for ? make("p", { class: "note" }, `It waits for ${WAITS[record.waits_for] ?? record.waits_for}.`) : null,
    record.error ? problem(record.error) : null,
    make("dl", { class: "big" }, entries([
      ["time", span(lasted(record, now()))], ["bytes", record.bytes ? size(record.bytes) : "–"], ["rate", rate(record.bytes_per_s)],
      ["tokens", record.tokens ? count(record.tokens[1] - record.tokens[0]) : "–"],
    ])),
    make("h3", {}, "Timeline", several && over(record) ? make("small", {}, ` rank ${record.slowest_rank} took the longest of ${shares.length}`) : null),
    timeline(shares.map((share) => lane(share, age))),
    record.why_slow ? make("p", { class: "note why" }, `It ${record.why_slow}.`) : null,
    beside(),
    make("h3", {}, several ? "Ranks" : "Figures"), ranks(shares, age),
    ...record.source ? sourceHalf(record, redraw) : [],
    make("h3", {}, "What it was"),
    make("dl", { class: "pairs" }, entries([
      ["started", moment(record.created_at * 1000)], ["ended", record.ended_at ? moment(record.ended_at * 1000) : ""],
      ["from", place(record.source?.engine_id, record.source?.address)], ["to", place(record.engine_id)],
      ["path", [record.path, record.transport].filter(Boolean).join(" over ")],
      ["tokens", record.tokens ? `${count(record.tokens[0])} to ${count(record.tokens[1])}` : ""],
      ["runs", record.descriptors ? count(record.descriptors) : ""], ["attempt", record.attempt || ""], ["lease", record.lease ?? ""],
      ...within(record.phases_ms), ["transfer", mono(record.transfer_id)],
    ])),
  ];
}

// The record that is open, or null. `found` is null where the daemon knows it no longer, and undefined while it is asked.
// `known`: all records.
export function setDetail(id, found, known = all) {
  const aside = at("detail"), was = record, others = found ? waitedForTheSame(found, known).map((other) => other.transfer_id).join() : "";
  all = known;
  if (found === record && found && others === shown && !aside.hidden) return;
  shown = others;
  record = found ?? null;
  document.body.classList.toggle("opened", Boolean(id));
  if (!id) {
    aside.hidden = true;
    return;
  }
  const close = make("a", { href: "#", class: "close", ariaLabel: "Close" }, "×");
  const focused = aside.contains(document.activeElement) && document.activeElement !== aside;
  const top = aside.scrollTop;
  aside.replaceChildren(close, ...(record ? draw() : [make("p", { class: "none" }, found === undefined ? "Asking the daemon." : "The daemon does not know this transfer, or no longer: it keeps the last ones only.")])
    .filter(Boolean));
  aside.hidden = false;
  aside.scrollTop = was?.transfer_id === record?.transfer_id ? top : 0;
  if (focused) close.focus();
  for (const row of document.querySelectorAll("#rows tr")) row.classList.toggle("chosen", !row.item?.key && row.item?.record.transfer_id === id);
}

function redraw() {
  if (record) setDetail(record.transfer_id, { ...record });
}

export function tickDetail() {
  if (record && !over(record)) redraw();
}
