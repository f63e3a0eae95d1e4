// Peers as a matrix: an engine is a row, each of its ranks a cell. Below them who reads from this daemon.

import { at, make, say } from "./dom.js";
import { now } from "./ask.js";
import { clock, count, plural, rate, size, span } from "./units.js";

const TONE = { connected: "good", idle: "", failing: "bad", lost: "bad" };

const ago = (seconds) => `${span(Math.max(1000, Math.round((now() - seconds * 1000) / 1000) * 1000)).replace(".0", "").replace(/\.\d+ s/, " s")} ago`;
const line = (name, ...value) => make("p", { class: name }, ...value);

function cell(peer) {
  const { last_error: error } = peer;
  return make("div", { class: `rank ${peer.state}` },
    line("which", make("i", { class: `dot ${TONE[peer.state] ?? ""}` }), make("b", {}, `rank ${peer.rank}`), make("small", {}, peer.state)),
    line("speed", make("b", {}, rate(peer.bytes_per_s ?? 0)), make("small", {}, peer.path || "no path taken yet")),
    line("", make("small", {}, [peer.transfers ? plural(peer.transfers, "transfer") : "", peer.p50_ms ? `half within ${span(peer.p50_ms)}` : "", peer.bytes_read ? size(peer.bytes_read) : ""].filter(Boolean).join(", "))),
    line("where", peer.address), line("", make("small", {}, peer.last_contact_at ? `answered ${ago(peer.last_contact_at)}` : "has not answered yet")),
    error ? line("why", make("b", {}, error.code), ` ${error.message}`, make("small", {}, ` ${clock(peer.last_error_at * 1000)}${peer.failures ? `, ${plural(peer.failures, "failure")} since` : ""}`)) : null);
}

function row(ranks) {
  const { engine_id, epoch, version, ways, state } = ranks[0];
  return make("div", { class: "peer" },
    make("div", { class: "who" }, make("h3", {}, engine_id), line("soft", `epoch ${epoch}`), version ? line("soft", `kvferry ${version}`) : null,
      state === "lost" ? null : make("a", { href: `#plan=${encodeURIComponent(engine_id)}` }, "who reads what")),
    make("div", { class: "ranks" }, ranks.toSorted((a, b) => a.rank - b.rank).map(cell)),
    make("dl", { class: "ways" }, Object.entries(ways).map(([way, why]) => make("div", { class: why ? "cannot" : "can" }, make("dt", {}, way), make("dd", {}, why || "possible")))));
}

function reader(inbound) {
  return make("tr", {}, make("td", { class: "engine" }, inbound.engine_id, make("small", {}, ` rank ${inbound.rank} of ${inbound.world_size}`)), make("td", { class: "where" }, inbound.address.replace(/^ipv[46]:/, "")),
    make("td", { class: "num" }, make("small", {}, "since "), clock(inbound.since * 1000)), make("td", { class: "num" }, count(inbound.reading), make("small", {}, " reading")),
    make("td", { class: "num" }, count(inbound.leases), make("small", {}, " read")), make("td", { class: "num" }, size(inbound.bytes)));
}

export function setPeers({ peers, lost, inbound }) {
  const all = [...peers, ...lost.map((peer) => ({ ...peer, state: "lost", ways: {} }))];
  const engines = Map.groupBy(all, (peer) => `${peer.engine_id}\n${peer.epoch}\n${peer.state === "lost"}`);
  say("peers-said", [peers.length ? `${plural(peers.length, "rank")} to read from` : "", lost.length ? `${count(lost.length)} lost` : "", inbound.length ? `${plural(inbound.length, "rank")} read here` : ""].filter(Boolean).join(", "));
  at("peers").replaceChildren(...[...engines.values()].map(row),
    inbound.length ? make("div", { class: "inbound" }, make("h3", {}, "Readers of this daemon"), make("table", {}, make("tbody", {}, inbound.map(reader)))) : "",
    all.length || inbound.length ? "" : make("p", { class: "none" }, "None yet. The first transfer shakes hands, and so does POST /v1/peers."));
}
