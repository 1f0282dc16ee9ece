// What the server has sent: calls, the state of each model, the list of models. One stream feeds it.

import { ask, events, json, Refused } from "./server.js";

const MAX_CALLS = 2000;
const MAX_SAMPLES = 2000;
const SILENCE_MS = 35000; // the server sends something every ten seconds: a longer silence is a dead connection
const GAP_S = 1;
const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 8000;

/** When the place of its bar is free again: even the shortest bar needs some room. */
function ends(call) {
  return call.ended_s == null ? Infinity : call.arrived_at + call.ended_s + GAP_S;
}

export class Store {
  constructor() {
    this.calls = new Map();
    this.lanes = new Map();
    this.states = new Map();
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
      if (call.ended_s == null) this._forget(id);
    }
  }

  _call(call) {
    const before = this.calls.get(call.id);
    if (before?.ended_s != null) return;
    if (call.ended_s != null) this.ended += 1;
    this.calls.set(call.id, call);
    if (!before) this.lanes.set(call.id, this._lane(call));
    for (const id of this.calls.keys()) {
      if (this.calls.size <= MAX_CALLS) break;
      this._forget(id);
    }
  }

  _forget(id) {
    this.calls.delete(id);
    this.lanes.delete(id);
  }

  /** The first row that is free for as long as this call goes on; the call keeps it. */
  _lane(call) {
    const taken = new Set();
    const end = ends(call);
    for (const other of this.calls.values()) {
      if (other.id === call.id) continue;
      const other_end = ends(other);
      if (other_end > call.arrived_at && other.arrived_at < end) taken.add(this.lanes.get(other.id));
    }
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    return lane;
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
