// The connection: server-sent events, with back-off, and a watch on its silence.

const SILENT_MS = 8000; // reports come every second, signs of life every five
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;

/**
 * Calls `on.report(report)`, `on.trouble({text, since, time, last_report})` and
 * `on.lost(waitMs)`; whatever becomes of the server, it tries again.
 */
export class Stream {
  #on;
  #source = null;
  #wait = FIRST_WAIT_MS;
  #timer = 0;

  constructor(on) {
    this.#on = on;
  }

  open() {
    this.close();
    const source = new EventSource("events");
    this.#source = source;
    const hear = (name, take) => source.addEventListener(name, (event) => {
      this.#wait = FIRST_WAIT_MS;
      this.#expect();
      take(JSON.parse(event.data));
    });
    hear("report", (report) => this.#on.report(report));
    hear("trouble", (trouble) => this.#on.trouble(trouble));
    source.onerror = () => this.#again();
    this.#expect();
  }

  close() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }

  #expect() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#again(), SILENT_MS);
  }

  #again() {
    this.close();
    const wait = this.#wait * (1 + Math.random() / 4); // not every open page at once
    this.#wait = Math.min(2 * this.#wait, LONGEST_WAIT_MS);
    this.#timer = setTimeout(() => this.open(), wait);
    this.#on.lost(wait);
  }
}
