// Figures as people read them.

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

export const rate = (bytesPerS) => Number.isFinite(bytesPerS) && bytesPerS > 0 ? `${size(bytesPerS)}/s` : "–";

export function span(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  const s = ms / 1000;
  if (s < 120) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
}

export const count = (number) => Math.round(number).toLocaleString("en");
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

const two = (number, digits = 2) => String(number).padStart(digits, "0");

// The time of day; with the day where it is another one than today.
export function clock(ms) {
  const then = new Date(ms);
  const time = `${two(then.getHours())}:${two(then.getMinutes())}:${two(then.getSeconds())}`;
  return then.toDateString() === new Date().toDateString() ? time : `${two(then.getMonth() + 1)}-${two(then.getDate())} ${time}`;
}

export function moment(ms) {
  const then = new Date(ms);
  return `${then.getFullYear()}-${two(then.getMonth() + 1)}-${two(then.getDate())} ${two(then.getHours())}:${two(then.getMinutes())}` +
    `:${two(then.getSeconds())}.${two(then.getMilliseconds(), 3)}`;
}

// Numbers as ranges: 0–3, 5.
export function ranges(numbers) {
  const spans = [];
  for (const number of [...new Set(numbers)].sort((a, b) => a - b)) {
    const last = spans.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else spans.push([number, number]);
  }
  return spans.map(([first, last]) => first === last ? `${first}` : `${first}–${last}`).join(", ");
}

// About `most` round steps from 0 up to `end`.
export function ticks(end, most) {
  const rough = end / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}
