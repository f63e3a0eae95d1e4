// Asking the daemon. Paths are relative: the page may lie below any path of a reverse proxy.

const KEPT = "kvferry-token", PATIENCE_MS = 5000;

export class NeedsToken extends Error {}
export class NoAnswer extends Error {}

export const token = {
  get: () => sessionStorage.getItem(KEPT),
  set: (text) => sessionStorage.setItem(KEPT, text),
  forget: () => sessionStorage.removeItem(KEPT),
};

// How far this machine's clock is ahead of the daemon's, as far as the Date header tells; differences of a second do not count.
let aheadMs = 0;
export const now = () => Date.now() - aheadMs;

export async function ask(path) {
  const held = token.get();
  const headers = held ? { authorization: `Bearer ${held}` } : {};
  let answer, body;
  try {
    answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    body = await answer.json();
  } catch (error) {
    throw new NoAnswer(error.message);
  }
  if (answer.status === 401) throw new NeedsToken();
  const ahead = Date.now() - Date.parse(answer.headers.get("date"));
  aheadMs = Math.abs(ahead) > 2000 ? ahead : 0;
  if (!answer.ok) throw new NoAnswer(body.detail ?? `${path} answered ${answer.status}`);
  return body;
}
