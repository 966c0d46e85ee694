// Figures and names as words for people, a few characters each.

export const NOTHING = "–";
export const NAME_LENGTH = 27;

const SNAPSHOT = /.*\/models--(?:[^/]*--)?([^/]+)\/snapshots\/([0-9a-f]{8})[0-9a-f]*\/?/u;

const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clocks = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});

/** Three digits that count, without an exponent: 0.85, 12.3, 1024. */
function digits(value) {
  return value >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}

function scaled(value, units, step) {
  let power = 0;
  while (power < units.length - 1 && value >= step) {
    value /= step;
    power += 1;
  }
  return `${power ? digits(value) : Math.round(value)} ${units[power]}`;
}

/** 1.5 GiB */
export function size(bytes) {
  return bytes == null ? NOTHING : scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
}

/** 1.25 GB/s: rates are given in decimal units. */
export function rate(perSecond) {
  return perSecond == null ? NOTHING : scaled(perSecond, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000);
}

/** 87 %; a share is between 0 and 1. */
export function percent(share) {
  return share == null ? NOTHING : `${digits(100 * share)} %`;
}

/** A count, with thousands apart. */
export function number(value) {
  return value == null ? NOTHING : numbers.format(value);
}

/** 1 chunk, 12 chunks */
export function several(count, singular, plural = `${singular}s`) {
  return `${number(count)} ${Math.round(count) === 1 ? singular : plural}`;
}

/** 85 µs, 1.2 ms, 3.4 s */
export function latency(seconds) {
  if (seconds == null) return NOTHING;
  if (seconds >= 1) return `${digits(seconds)} s`;
  return seconds >= 1e-3 ? `${digits(seconds * 1e3)} ms` : `${Math.round(seconds * 1e6)} µs`;
}

/** 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h */
export function duration(seconds) {
  if (seconds == null) return NOTHING;
  let left = Math.max(0, Math.floor(seconds));
  const parts = [];
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    if (left >= length) {
      parts.push(`${Math.floor(left / length)} ${unit}`);
      left %= length;
    }
  }
  return parts.slice(0, 2).join(" ") || "0 s";
}

/** 14:05:09, of unix seconds, where the reader is. */
export function clock(time) {
  return clocks.format(new Date(time * 1000));
}

/** A GPU's name has 32 digits of a UUID; eight tell it from others. */
export function device(name) {
  return name.startsWith("cuda:") ? name.slice(0, 13) : name;
}

/**
 * vllm-llama-3-…d8f6b5d-x2k4q: at most `NAME_LENGTH` characters, the middle left out. A path in
 * a Hugging Face cache becomes model and revision first: Qwen3-8B@6f6073b4. The same rule as
 * `shorten` in kvd/metrics/reading.py.
 */
export function shorten(name) {
  const [head, tail] = halves(name);
  return tail ? `${[...head].slice(0, NAME_LENGTH / 2).join("")}…${tail}` : head;
}

/**
 * A name's beginning and the end that is shown in any case; the end is empty where the name is
 * short. A path in a Hugging Face cache becomes model and revision.
 */
export function halves(name) {
  let letters = [...name];
  if (letters.length > NAME_LENGTH) letters = [...name.replace(SNAPSHOT, "$1@$2")];
  const end = letters.length > NAME_LENGTH ? letters.length - Math.floor(NAME_LENGTH / 2) : letters.length;
  return [letters.slice(0, end).join(""), letters.slice(end).join("")];
}
