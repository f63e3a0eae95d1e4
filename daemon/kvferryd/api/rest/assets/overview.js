// What is held and waits: the first look.

import { at, entries, make } from "./dom.js";
import { median } from "./record.js";
import { count, size, span } from "./units.js";

export function drawTotals(totals, records) {
  const { transfers, leases, waiting } = totals;
  const live = ["waiting", "connecting", "reading", "verifying"].reduce((sum, state) => sum + (transfers[state] ?? 0), 0);
  const waits = Object.entries(waiting).filter(([, number]) => number).map(([what, number]) => `${count(number)} for ${what}`).join(", ");
  const done = records.filter((record) => record.state === "done" && record.took_ms);
  const cell = (value, more, tone) => make("span", { class: tone ?? "" }, value, more ? make("small", {}, ` ${more}`) : null);
  at("totals").replaceChildren(...entries([
    ["under way", cell(count(live), waits)],
    ["done", cell(count(transfers.done ?? 0), transfers.done && done.length ? `median ${span(median(done.map((record) => record.took_ms)))}` : "")],
    ["failed", cell(count(transfers.failed ?? 0), transfers.aborted ? `${count(transfers.aborted)} aborted` : "", transfers.failed ? "bad" : "")],
    ["queue", cell(count(totals.queue))],
    ["leases held", cell(count((leases.publishing ?? 0) + (leases.published ?? 0)), totals.live_readers ? `${count(totals.live_readers)} reading` : "")],
    ["read", cell(size(totals.read_bytes))],
    ["served", cell(size(totals.served_bytes))],
    ["quarantine", cell(size(totals.quarantined_bytes), "", totals.quarantined_bytes ? "bad" : "")],
    ["arena", totals.staging_bytes ? cell(size(totals.staging_used_bytes), `of ${size(totals.staging_bytes)}`) : cell("none")],
    ["process", totals.process_bytes ? cell(size(totals.process_bytes), totals.unfreed_bytes ? `${size(totals.unfreed_bytes)} not given back` : "memory", totals.unfreed_bytes ? "bad" : "") : ""],
  ]));
}
