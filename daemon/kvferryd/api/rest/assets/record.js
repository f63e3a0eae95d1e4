// What the figures of transfers and leases mean. The daemon's own are taken as they are: phases and rate of a record
// are those of the rank that took the longest.

export const PHASES = ["waiting", "connecting", "reading", "verifying"];
const OVER = new Set(["done", "failed", "aborted", "released", "expired", "revoked"]);
const WAITED = new Set(["order", "reservation", "publish"]);

export const over = (record) => OVER.has(record.state);
export const isSlowest = (share, record) => record.ranks.length > 1 && share.rank === record.slowest_rank;
export const ageMs = (record, now) => Math.max(0, now - record.created_at * 1000);

// Milliseconds in each phase. A phase is counted at its end: until then what is left of a live share's age belongs to it.
export function phases(share, age) {
  const spent = Object.fromEntries(PHASES.map((name) => [name, share.phases_ms[name] ?? 0]));
  const live = WAITED.has(share.waits_for) ? "waiting" : share.state;
  if (!over(share) && live in spent) spent[live] += Math.max(0, age - sum(spent));
  return spent;
}

export const sum = (spent) => PHASES.reduce((all, name) => all + spent[name], 0);
export const lasted = (record, now) => over(record) ? record.took_ms ?? sum(phases(record, 0)) : ageMs(record, now);

// Transfers of other requests that waited longest for the same while this one did, or within a second of it: as `kvferry
// explain --transfer` has them.
export function waitedForTheSame(record, all) {
  const wait = record.waited_longest, end = ({ began_at, ms }) => began_at + ms / 1000 + 1;
  return wait ? all.filter(({ request_id, waited_longest: other }) => request_id !== record.request_id && other
    && other.what === wait.what && other.on === wait.on && other.began_at <= end(wait) && wait.began_at <= end(other)) : [];
}

export function matches(record, words) {
  const text = [
    record.request_id, record.transfer_id, record.engine_id, record.source?.engine_id, record.source?.address, record.path,
    record.transport, record.state, record.waits_for, record.error?.code, record.error?.message,
  ].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

export function median(numbers) {
  const sorted = numbers.toSorted((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : NaN;
}
