// Requests to the server that the page came from, with the user's key.

const KEY = "firn.key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Kept for this tab only: a reload finds it, other tabs and later visits do not. */
export const key = {
  get: () => read(sessionStorage, KEY),
  set: (value) => write(sessionStorage, KEY, value),
};

export function read(storage, name) {
  try {
    return storage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

export function write(storage, name, value) {
  try {
    if (value) storage.setItem(name, value);
    else storage.removeItem(name);
  } catch {
    // Full, or switched off: the page works all the same until it is closed.
  }
}

export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const url = new URL(path, document.baseURI);
  const text = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(url, { method, headers, body: text, signal, cache: "no-store", redirect: "error" });
  if (!response.ok) throw new Refused(response.status, await reason(response));
  return response;
}

export async function json(path, options) {
  return (await ask(path, options)).json();
}

async function reason(response) {
  try {
    const { error } = await response.json();
    return typeof error === "string" ? error : error.message;
  } catch {
    return `The server answered with ${response.status}.`;
  }
}

/** Events of a stream, as [name, data]; heard() is called with every piece, comments too. */
export async function* events(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        let name = "message";
        let data = "";
        for (const line of frame.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        if (data) yield [name, data];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
