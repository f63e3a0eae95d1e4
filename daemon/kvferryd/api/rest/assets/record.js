// What the figures of a transfer's record mean.

export const PHASES = ["waiting", "connecting", "reading", "verifying"];
const OVER = new Set(["done", "failed", "aborted", "released", "expired", "revoked"]);
export const over = (record) => OVER.has(record.state);

// The rank that took the longest is the one that the request waited for.
export function slowest(record) {
  const shares = record.ranks ?? [];
  return shares.reduce((worst, share) => total(share) > total(worst) ? share : worst, shares[0] ?? record);
}

export const total = (share) => share.phases_ms?.total ?? PHASES.reduce((sum, name) => sum + (share.phases_ms?.[name] ?? 0), 0);

// Milliseconds in each phase. A phase is counted at its end: until then what is left of a live share's age is its state's.
export function phases(share, ageMs) {
  const spent = Object.fromEntries(PHASES.map((name) => [name, share.phases_ms?.[name] ?? 0]));
  const sum = PHASES.reduce((all, name) => all + spent[name], 0);
  if (!over(share) && share.state in spent) spent[share.state] += Math.max(0, ageMs - sum);
  return spent;
}

export const ageMs = (record, now) => Math.max(0, now - record.created_at * 1000);
export const lasted = (record, now) => over(record) ? total(slowest(record)) : Math.max(total(slowest(record)), ageMs(record, now));

// Bytes a second of the time in which they moved: all ranks' bytes over the slowest rank's time.
export function speed(record) {
  const moving = Math.max(0, ...(record.ranks?.length ? record.ranks : [record]).map((share) => share.phases_ms?.moving || share.phases_ms?.reading || 0));
  return moving > 0 && record.bytes ? record.bytes / moving * 1000 : 0;
}

export function matches(record, words) {
  const text = [
    record.request_id, record.transfer_id, record.engine_id, record.source?.engine_id, record.source?.address, record.path,
    record.transport, record.state, record.error?.code, record.error?.message,
  ].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}
