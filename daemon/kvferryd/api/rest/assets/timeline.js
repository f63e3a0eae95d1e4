// Lanes of one axis of time, from 0 on.

import { make } from "./dom.js";
import { span, ticks } from "./units.js";

// lanes: { name, parts, error, state }. parts: [class, from, to, title] in milliseconds, each in front of the one before.
export function timeline(lanes) {
  const end = Math.max(...lanes.flatMap(({ parts }) => parts.map(([, , to]) => to)), 0.001);
  const mark = (ms) => {
    const late = ms / end > 0.8;  // its text stands before it
    const tick = make("span", { class: `tick ${late ? "late" : ""}` }, make("small", {}, ms ? span(ms) : "0"));
    tick.style[late ? "right" : "left"] = `${100 * (late ? 1 - ms / end : ms / end)}%`;
    return tick;
  };
  const axis = make("div", { class: "axis" }, ticks(end, 4).map(mark));
  return make("div", { class: "timeline" }, lanes.map(({ name, parts, error, state }) => {
    const lane = make("div", { class: "lane" });
    for (const [kind, from, to, title] of parts) {
      const part = make("i", { class: kind, title });
      part.style.left = `${100 * from / end}%`;
      part.style.width = `${100 * (to - from) / end}%`;
      lane.append(part);
    }
    if (error) lane.append(make("em", {}, error));
    return make("div", { class: `of-rank ${state ?? ""}` }, make("span", {}, name), lane);
  }), make("div", { class: "of-rank" }, make("span"), axis));
}
