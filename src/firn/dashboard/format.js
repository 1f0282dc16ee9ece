// Numbers for people: few digits, always a unit. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  if (n == null || !Number.isFinite(n)) return "–";
  let i = 0;
  while (Math.abs(n) >= 1024 && i < UNITS.length - 1) {
    n /= 1024;
    i += 1;
  }
  return `${i && Math.abs(n) < 100 ? trim(n, 1) : Math.round(n)} ${UNITS[i]}`;
}

export function count(n) {
  return n == null || !Number.isFinite(n) ? "–" : Math.round(n).toLocaleString("en-US");
}

export function tokens(n) {
  return `${count(n)} ${n === 1 ? "token" : "tokens"}`;
}

/** Short, for labels: 950, 1.2K, 34K, 1.2M. */
export function short(n) {
  if (n < 1000) return n < 10 ? trim(n, 1) : String(Math.round(n));
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "K"]]) {
    if (n >= size) return `${n / size < 10 ? trim(n / size, 1) : Math.round(n / size)}${unit}`;
  }
}

export function seconds(s) {
  if (s == null || !Number.isFinite(s)) return "–";
  if (s < 0.0005) return "0 ms";
  if (s < 0.9995) return `${s < 0.01 ? trim(s * 1000, 1) : Math.round(s * 1000)} ms`;
  if (s < 99.5) return `${s < 10 ? trim(s, 2) : trim(s, 1)} s`;
  if (s < 5940) return `${s < 594 ? trim(s / 60, 1) : Math.round(s / 60)} min`;
  if (s < 172800) return `${trim(s / 3600, 1)} h`;
  return `${trim(s / 86400, 1)} days`;
}

export function rate(n) {
  if (n == null || !Number.isFinite(n)) return "–";
  return n < 10 ? trim(n, 1) : count(n);
}

export function percent(share) {
  if (share == null || !Number.isFinite(share)) return "–";
  const value = share * 100;
  return `${value > 0 && value < 10 || value > 99 && value < 100 ? trim(value, 1) : Math.round(value)} %`;
}

export function ago(s) {
  if (s < 5) return "just now";
  return `${seconds(s < 60 ? Math.round(s) : s)} ago`;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** At least `n` round values from 0 up to what covers `top`. */
export function ticks(top, n = 3) {
  const raw = Math.max(top, 1e-9) / n;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * size).find((s) => s >= raw);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, i) => i * step);
}

function trim(n, digits) {
  return String(Number(n.toFixed(digits)));
}
