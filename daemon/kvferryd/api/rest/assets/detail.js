// One transfer: what it was, why it failed, its ranks on one timeline.

import { at, chip, entries, make } from "./dom.js";
import { PHASES, ageMs, lasted, over, phases, slowest, speed } from "./record.js";
import { count, moment, rate, size, span, ticks } from "./units.js";
import { now } from "./ask.js";

let record = null;

const mono = (text) => text ? make("code", {}, text) : "";
const place = (engineId, ...more) => engineId ? make("span", {}, mono(engineId), ...more.filter(Boolean).map((each) => make("small", {}, ` ${each}`))) : "";

export function problem(error) {
  return make("div", { class: "problem" },
    make("b", {}, error.code), make("p", {}, error.message),
    error.field ? make("p", {}, make("small", {}, `${error.field} = `), mono(error.value)) : null,
    error.remedy ? make("p", { class: "remedy" }, error.remedy) : null);
}

function timeline(shares, age) {
  const lanes = shares.map((share) => [share, phases(share, age)]);
  const end = Math.max(...lanes.map(([, spent]) => PHASES.reduce((sum, name) => sum + spent[name], 0)), 0.001);
  const mark = (ms) => {
    const tick = make("span", { class: "tick" }, make("small", {}, ms ? span(ms) : "0"));
    tick.style.left = `${100 * ms / end}%`;
    return tick;
  };
  const axis = make("div", { class: "axis" }, ticks(end, 4).map(mark));
  return make("div", { class: "timeline" }, lanes.map(([share, spent]) => {
    const lane = make("div", { class: "lane" });
    let at = 0;
    for (const name of PHASES) if (spent[name] > 0) {
      const part = make("i", { class: name, title: `${name} ${span(spent[name])}` });
      part.style.left = `${100 * at / end}%`;
      part.style.width = `${100 * spent[name] / end}%`;
      lane.append(part);
      at += spent[name];
    }
    if (share.error) lane.append(make("em", {}, share.error.code));
    return make("div", { class: `of-rank ${share.state}` }, make("span", {}, `rank ${share.rank ?? 0}`), lane);
  }), make("div", { class: "of-rank" }, make("span"), axis));
}

function ranks(shares, age, slow) {
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
      return make("tr", { class: share === slow && shares.length > 1 ? "slow" : "" },
        cell("rank", share.rank ?? 0), cell("state", chip(share.state)), cell("bytes", share.bytes ? size(share.bytes) : "–"),
        cell("runs", share.descriptors ? count(share.descriptors) : "–"), cell("rate", rate(speed({ ...share, ranks: [] }))),
        PHASES.map((name) => cell(name, spent[name] ? span(spent[name]) : "–")),
        cell("time", make("b", {}, span(PHASES.reduce((sum, name) => sum + spent[name], 0)))));
    })));
}

function draw() {
  const age = ageMs(record, now()), slow = slowest(record), shares = record.ranks?.length ? record.ranks : [record];
  const several = shares.length > 1;
  const tokens = record.tokens ? `${count(record.tokens[0])}–${count(record.tokens[1])}` : "";
  return [
    make("div", { class: "head" }, chip(record.state), make("h2", {}, record.request_id)),
    record.error ? problem(record.error) : null,
    make("dl", { class: "big" }, entries([
      ["time", span(lasted(record, now()))], ["bytes", record.bytes ? size(record.bytes) : "–"], ["rate", rate(speed(record))],
      ["tokens", record.tokens ? count(record.tokens[1] - record.tokens[0]) : "–"],
    ])),
    make("h3", {}, several ? `Timeline, ${shares.length} ranks` : "Timeline",
      several && over(record) ? make("small", {}, ` rank ${slow.rank} took longest`) : null),
    timeline(shares, age),
    make("h3", {}, several ? "Ranks" : "Figures"), ranks(shares, age, slow),
    make("h3", {}, "What it was"),
    make("dl", { class: "pairs" }, entries([
      ["started", moment(record.created_at * 1000)], ["from", place(record.source?.engine_id, record.source?.address)], ["to", place(record.engine_id)],
      ["path", [record.path, record.transport].filter(Boolean).join(" over ")], ["tokens", tokens],
      ["runs", record.descriptors ? count(record.descriptors) : ""], ["transfer", mono(record.transfer_id)], ["trace", mono(record.trace_id)],
    ])),
  ];
}

// The record that is open, or null. `found` is null where the daemon knows it no longer.
export function setDetail(id, found) {
  const aside = at("detail"), was = record;
  if (found === record && found && !aside.hidden) return;
  record = found;
  document.body.classList.toggle("opened", Boolean(id));
  if (!id) {
    aside.hidden = true;
    return;
  }
  const close = make("a", { href: "#", class: "close", ariaLabel: "Close" }, "×");
  const focused = aside.contains(document.activeElement) && document.activeElement !== aside;
  const top = aside.scrollTop;
  aside.replaceChildren(close, ...(record ? draw() : [make("p", { class: "none" }, "The daemon does not know this transfer, or no longer: it keeps the last ones only.")])
    .filter(Boolean));
  aside.hidden = false;
  aside.scrollTop = was?.transfer_id === record?.transfer_id ? top : 0;
  if (focused) close.focus();
  for (const row of document.querySelectorAll("#rows tr")) row.classList.toggle("chosen", row.drawn?.transfer_id === id);
}

export function tickDetail() {
  if (record && !over(record)) setDetail(record.transfer_id, { ...record });
}
