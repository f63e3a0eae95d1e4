// Peers as a matrix: an engine is a row, each of its ranks a cell.

import { at, chip, make, say } from "./dom.js";
import { speed } from "./record.js";
import { count, plural, rate, size } from "./units.js";

function median(numbers) {
  const sorted = numbers.toSorted((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : 0;
}

function cell(peer) {
  return make("div", { class: "rank" },
    make("p", { class: "which" }, make("i", { class: "dot good" }), make("b", {}, `rank ${peer.rank}`), make("span", { class: "num" }, peer.bytes_read ? size(peer.bytes_read) : "–")),
    make("p", { class: "where" }, peer.address));
}

export function setPeers(all, records) {
  say("peers-said", all.length ? plural(new Set(all.map((peer) => peer.engine_id)).size, "engine") + `, ${plural(all.length, "rank")}` : "");
  if (!all.length) {
    at("peers").replaceChildren(make("p", { class: "none" }, "None yet. The first transfer shakes hands, and so does POST /v1/peers."));
    return;
  }
  const engines = Map.groupBy(all, (peer) => `${peer.engine_id}\n${peer.epoch}`);
  at("peers").replaceChildren(...[...engines.values()].map((ranks) => {
    const { engine_id, epoch, version, ways } = ranks[0];
    const done = records.filter((record) => record.state === "done" && record.source?.engine_id === engine_id);
    const measured = Map.groupBy(done.filter(speed), (record) => `${record.path} over ${record.transport}`);
    return make("div", { class: "peer" },
      make("div", { class: "who" }, make("h3", {}, engine_id), make("p", { class: "soft" }, `epoch ${epoch}, kvferry ${version}`),
        make("p", {}, make("a", { href: `#plan=${encodeURIComponent(engine_id)}` }, "who reads what"))),
      make("div", { class: "ranks" }, ranks.toSorted((a, b) => a.rank - b.rank).map(cell)),
      make("dl", { class: "ways" }, Object.entries(ways).map(([way, why]) => {
        const found = [...measured].filter(([name]) => name.startsWith(`${way} `));
        const said = found.map(([name, list]) => `${rate(median(list.map(speed)))} ${name.slice(way.length + 1)}, ${plural(list.length, "transfer")}`);
        return make("div", { class: why ? "cannot" : "can" }, make("dt", {}, way), make("dd", {}, said.join("; ") || why || "possible, not measured yet"));
      })));
  }));
}
