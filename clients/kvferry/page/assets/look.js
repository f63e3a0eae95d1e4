// A page that looks again and again while it is in view, and asks for a token where it needs one.

import { NeedsToken, NoAnswer, token } from "./ask.js";
import { at, say } from "./dom.js";

// What is drawn is new.
export function shown() {
  at("content").hidden = false;
  at("login").hidden = true;
  document.body.classList.remove("stale");
}

function askForToken() {
  say("refused", token.get() ? "that token was not taken" : "");
  token.forget();
  at("login").hidden = false;
  at("content").hidden = true;
  at("token").focus();
}

// draw: asks, draws and calls `shown`. lost: says that what is drawn is old, since nobody answers. everyMs: between the end
// of a look and the next. Returns what looks now.
export function looking(draw, lost, everyMs) {
  let timer = 0, asking = false;

  async function look() {
    clearTimeout(timer);
    if (asking || document.hidden) return;
    asking = true;
    let next = everyMs;
    try {
      await draw();
    } catch (error) {
      if (error instanceof NeedsToken) {
        askForToken();
        next = 0;
      } else {
        lost(error);
        document.body.classList.add("stale");
        if (!(error instanceof NoAnswer)) console.error(error);
      }
    }
    asking = false;
    if (next) timer = setTimeout(look, next);
  }

  at("login").addEventListener("submit", (event) => {
    event.preventDefault();
    token.set(at("token").value.trim());
    at("token").value = "";
    look();
  });
  document.addEventListener("visibilitychange", look);
  return look;
}
