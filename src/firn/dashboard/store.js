// What the server has sent: calls, the state of each model, the list of models. One stream feeds it.

import { ask, events, json, Refused } from "./server.js";

const MAX_CALLS = 2000;
const MAX_SAMPLES = 2000;
const SILENCE_MS = 35000; // the server sends something every ten seconds: a longer silence is a dead connection
const RATE_S = 5; // the tokens per second of now are those of this time
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 8000;

export class Store {
  constructor() {
    this.calls = new Map();
    this.states = new Map();
    this.written = []; // reply tokens of late: [model, from, to, tokens]
    this.samples = new Map(); // by model: [time, row steps, tokens taken] of speculation
    this.models = [];
    this.several = false;
    this.status = "connecting"; // connecting, live, lost, key
    this.why = "";
    this.version = "";
    this.outdated = false;
    this.offset = 0; // the server's clock less this one, in seconds
    this.ended = 0; // calls that have ended since the page was opened
    this._listeners = new Set();
    this._abort = null;
    this._queued = false;
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  now() {
    return Date.now() / 1000 + this.offset;
  }

  /** Changes that come together are rendered once. */
  changed() {
    if (this._queued) return;
    this._queued = true;
    setTimeout(() => {
      this._queued = false;
      for (const listener of this._listeners) listener();
    }, 30);
  }

  /** Watch until the page is left, or until a key is asked for. */
  async watch() {
    let wait = FIRST_RETRY_MS;
    this.stop();
    const abort = (this._abort = new AbortController());
    while (!abort.signal.aborted) {
      try {
        await this._listen(abort, () => (wait = FIRST_RETRY_MS));
        this._say("lost", "The server has ended the stream.");
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error instanceof Refused && error.status === 401) {
          this._say("key", error.message);
          return;
        }
        this._say("lost", error instanceof Refused ? error.message : "The server does not answer.");
      }
      await new Promise((done) => setTimeout(done, wait));
      wait = Math.min(wait * 2, MAX_RETRY_MS);
    }
  }

  stop() {
    this._abort?.abort();
  }

  async _listen(outer, connected) {
    const line = new AbortController();
    const end = () => line.abort();
    outer.signal.addEventListener("abort", end);
    let timer = setTimeout(end, SILENCE_MS);
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(end, SILENCE_MS);
    };
    try {
      const response = await ask("v1/activity", { signal: line.signal });
      this._say("live", "");
      connected();
      await this.listModels();
      for await (const [name, data] of events(response, heard)) this._take(name, JSON.parse(data));
    } finally {
      clearTimeout(timer);
      outer.signal.removeEventListener("abort", end);
    }
  }

  async listModels() {
    const { data } = await json("v1/models?limit=1000");
    const known = new Map(this.models.map((m) => [m.id, m]));
    this.models = data.map((m) => ({ ...known.get(m.id), ...m }));
    this.several = data.some((m) => "default" in m); // only a server of several models says which is the default
    this.changed();
  }

  _take(name, value) {
    if (name === "hello") this._hello(value);
    else if (name === "calls") value.forEach((call) => this._call(call));
    else if (name === "state") this._state(value);
    else if (name === "models") this._models(value);
    this.changed();
  }

  _hello({ version, now }) {
    this.offset = now - Date.now() / 1000;
    this.outdated = this.version !== "" && this.version !== version;
    this.version ||= version;
    // Open calls belonged to a connection that is gone: those that go on are sent again.
    for (const [id, call] of this.calls) {
      if (call.ended_s == null) this.calls.delete(id);
    }
  }

  _call(call) {
    const before = this.calls.get(call.id);
    if (before?.ended_s != null) return;
    if (call.ended_s != null) this.ended += 1;
    this._count(before, call);
    this.calls.set(call.id, call);
    for (const id of this.calls.keys()) {
      if (this.calls.size <= MAX_CALLS) break;
      this.calls.delete(id);
    }
  }

  /** The reply tokens that came since the call was last heard of, and in what time. */
  _count(before, call) {
    call.heard_at = this.now();
    const n = call.reply_tokens - (before?.reply_tokens ?? 0);
    if (n <= 0) return;
    const first = call.arrived_at + (call.first_token_s ?? 0);
    const to = call.ended_s == null ? call.heard_at : call.arrived_at + call.ended_s;
    const from = Math.min(Math.max(before?.heard_at ?? first, first), to);
    this.written = this.written.filter(([, , end]) => end > call.heard_at - RATE_S);
    this.written.push([call.model, from, to, n]);
  }

  writtenPerSecond(model) {
    const now = this.now();
    const tokens = this.written.filter(([of]) => !model || of === model).map(([, from, to, n]) => {
      if (to <= now - RATE_S) return 0;
      return to > from ? (n * (to - Math.max(from, now - RATE_S))) / (to - from) : n;
    });
    return tokens.reduce((sum, n) => sum + n, 0) / RATE_S;
  }

  _state(state) {
    this.states.set(state.model, state);
    const { row_steps, taken } = state.speculation ?? {};
    if (row_steps == null) return;
    const samples = this.samples.get(state.model) ?? [];
    const last = samples.at(-1);
    if (last && row_steps < last[1]) samples.length = 0; // the server has restarted
    samples.push([this.now(), row_steps, taken]);
    if (samples.length > MAX_SAMPLES) samples.shift();
    this.samples.set(state.model, samples);
  }

  _models(list) {
    const known = new Map(this.models.map((m) => [m.id, m]));
    this.models = list.map((m) => ({ ...known.get(m.id), ...m }));
    for (const { id, state } of list) {
      if (state !== "loaded") this.states.delete(id);
    }
    if (list.some((m) => !known.has(m.id))) this.listModels().catch(() => {});
  }

  _say(status, why) {
    this.status = status;
    this.why = why;
    this.changed();
  }
}
