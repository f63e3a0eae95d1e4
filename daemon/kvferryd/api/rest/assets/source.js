// The source's half of a transfer: what its daemons say when somebody looks, by their own clocks. Two clocks are never
// compared, so it has an axis of its own, from the source's first publish on.

import { ask } from "./ask.js";
import { make } from "./dom.js";
import { over } from "./record.js";
import { timeline } from "./timeline.js";
import { size, span } from "./units.js";

const COLUMNS = ["rank", "read by", "published", "opened", "packed", "closed", "bytes"];
let asked = "", told = null;

// The elements for this record, as far as they are known. It is asked for once, again when a lease is known, and again
// after the end; `changed` is called when there is an answer.
export function sourceHalf(record, changed) {
  const question = `${record.transfer_id} ${record.lease} ${over(record)}`;
  if (asked !== question) {
    if (!asked.startsWith(record.transfer_id)) told = null;
    asked = question;
    ask(`v1/transfers/${record.transfer_id}/source`).catch((error) => ({ ranks: [], why: error.message })).then((answer) => {
      if (asked !== question) return;
      told = answer;
      changed();
    });
  }
  return [make("h3", { class: "half" }, "The source's half", make("small", {}, " by its own clock, from its first publish on")), ...told ? draw(told) : [make("p", { class: "soft" }, "Asking the source.")]];
}

function draw({ ranks, why }) {
  const reads = ranks.flatMap(({ rank, lease }) => (lease?.readers ?? []).map((reader) => ({ rank, lease, reader })));
  return [
    why ? make("p", { class: "soft" }, `It is not known: ${why}.`) : null,
    ...ranks.filter(({ error }) => error).map(({ rank, address, error }) =>
      make("p", { class: "note" }, `Rank ${rank} at ${address} does not say: `, make("b", {}, error.code), ` ${error.message}`)),
    reads.length ? timeline(reads.map(lane)) : null,
    reads.length ? table(reads) : null,
  ].filter(Boolean);
}

function lane({ rank, lease, reader }) {
  const shown = lease.shown_ms ?? lease.age_ms, begins = Math.max(reader.opened_ms ?? shown, shown), ends = reader.closed_ms ?? lease.age_ms;
  const parts = [["waiting", 0, shown, `published ${span(shown)}`]];
  if (reader.packed_ms > begins) parts.push(["connecting", begins, reader.packed_ms, `packed ${span(reader.packed_ms)}`]);
  const packed = Math.max(begins, reader.packed_ms ?? 0);
  if (reader.opened_ms !== null && ends > packed) parts.push(["served", packed, ends, reader.closed_ms === null ? "still open" : `closed ${span(ends)}`]);
  return { name: `${rank} → ${reader.rank}`, parts, error: reader.state === "left" ? "left" : "" };
}

function table(reads) {
  const cell = (name, value) => {
    const made = make("td", { class: COLUMNS.indexOf(name) > 1 ? "num" : "" }, value);
    made.dataset.name = name;
    return made;
  };
  return make("table", { class: "cells" },
    make("thead", {}, make("tr", {}, COLUMNS.map((name, i) => make("th", { scope: "col", class: i > 1 ? "num" : "" }, name)))),
    make("tbody", {}, reads.map(({ rank, lease, reader }) => make("tr", {},
      cell("rank", rank), cell("read by", `rank ${reader.rank}`), cell("published", span(lease.shown_ms)), cell("opened", span(reader.opened_ms)),
      cell("packed", span(reader.packed_ms)), cell("closed", span(reader.closed_ms)), cell("bytes", reader.bytes ? size(reader.bytes) : "–")))));
}
