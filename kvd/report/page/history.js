// Reports over time: what happened between two of them, and how fast. Pure.

export const KEEP_SECONDS = 600;
const DETAIL_SECONDS = 60; // whole reports, for differences of histograms
const SMOOTH_SECONDS = 3; // lanes tell their counters twice a second; this evens it out
const HITS_SECONDS = 10;

/** Few figures of every report for as long as the charts reach; whole reports for a minute. */
export class History {
  samples = [];
  reports = [];

  /** Take a report; says whether the daemon was started anew since the last one. */
  add(report) {
    const last = this.reports.at(-1);
    const restarted = last !== undefined && last.boot_id !== report.boot_id;
    if (restarted) this.reports = [];
    if (last && !restarted && report.time <= last.time) return false;
    this.reports.push(report);
    this.samples.push({ time: report.time, boot: report.boot_id, counters: report.counters });
    while (report.time - this.reports[0].time > DETAIL_SECONDS) this.reports.shift();
    while (report.time - this.samples[0].time > KEEP_SECONDS) this.samples.shift();
    return restarted;
  }

  /** Take what was before the first report, as `/history` gives it. */
  recall({ fields, samples, report }) {
    const { time: first, boot } = this.samples[0];
    if (report?.boot_id !== boot) return;
    const older = samples.filter(([time]) => time < first).map(([time, ...values]) => (
      { time, boot, counters: Object.fromEntries(fields.map((field, i) => [field, values[i]])) }));
    this.samples.unshift(...older);
    if (report.time < first && this.before.boot_id === boot) this.reports.unshift(report);
  }

  get now() {
    return this.reports.at(-1);
  }

  /** The oldest report of the last minute, of this boot. */
  get before() {
    return this.reports[0];
  }

  /** How far back a chart reaches: to the daemon's start, unless it or what is seen is older. */
  get seconds() {
    const { time, started } = this.now;
    const first = Math.min(started, this.samples[0].time);
    return Math.min(KEEP_SECONDS, Math.max(1, time - first));
  }

  /** Times at which a daemon was seen for the first time after another one. */
  get restarts() {
    return this.samples.filter((s, i) => i && this.samples[i - 1].boot !== s.boot).map((s) => s.time);
  }

  /** [{time, value}] of a counter's growth per second; null where nothing is known. */
  rates(counter) {
    return this.#series(SMOOTH_SECONDS, (now, before, seconds) =>
      Math.max(0, now[counter] - before[counter]) / seconds);
  }

  /** [{time, value}] of the share of `part` in `whole`, both counted over a few seconds. */
  shares(part, whole) {
    return this.#series(HITS_SECONDS, (now, before) => share(now, before, part, whole));
  }

  #series(window, figure) {
    let first = 0;
    return this.samples.map((sample, index) => {
      while (sample.time - this.samples[first].time > window || this.samples[first].boot !== sample.boot) {
        first += 1;
      }
      // After a gap the sample before is older than the window; it is still all that is known.
      const from = first < index ? first : index - 1;
      const before = this.samples[from];
      const known = before && before.boot === sample.boot && sample.time - before.time < 2 * HITS_SECONDS;
      const value = known ? figure(sample.counters, before.counters, sample.time - before.time) : null;
      return { time: sample.time, value };
    });
  }
}

/** Growth of one counter in that of another; null where nothing was counted. */
export function share(now, before, part, whole) {
  const total = now[whole] - before[whole];
  return total > 0 ? Math.min(1, Math.max(0, (now[part] - before[part]) / total)) : null;
}

/** What a histogram has gained; what was not there before had counted nothing. */
export function gained(now, before) {
  if (!now || !before) return now ?? null;
  return {
    bounds: now.bounds,
    counts: now.counts.map((count, i) => Math.max(0, count - before.counts[i])),
    sum: now.sum - before.sum,
  };
}

/** The sum of histograms with the same bounds. */
export function merged(histograms) {
  const present = histograms.filter(Boolean);
  if (!present.length) return null;
  return {
    bounds: present[0].bounds,
    counts: present[0].counts.map((_, i) => present.reduce((sum, one) => sum + one.counts[i], 0)),
    sum: present.reduce((sum, one) => sum + one.sum, 0),
  };
}

export function count(histogram) {
  return histogram ? histogram.counts.reduce((sum, one) => sum + one, 0) : 0;
}

export function mean(histogram) {
  const total = count(histogram);
  return total ? histogram.sum / total : null;
}

/** The value below which a share `q` lies, by straight lines within buckets; null if empty. */
export function quantile(histogram, q) {
  const total = count(histogram);
  if (!total) return null;
  const { bounds, counts } = histogram;
  let below = 0;
  for (let i = 0; i < bounds.length; i += 1) {
    if (counts[i] && below + counts[i] >= q * total) {
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * Math.max(0, q * total - below)) / counts[i];
    }
    below += counts[i];
  }
  return bounds.at(-1);
}

/** [{time, values}] by minute, newest first: means of what was known in each. */
export function byMinute(serieses) {
  const minutes = new Map();
  serieses.forEach((series, i) => {
    for (const { time, value } of series) {
      const minute = Math.floor(time / 60) * 60;
      if (!minutes.has(minute)) minutes.set(minute, serieses.map(() => []));
      if (value != null) minutes.get(minute)[i].push(value);
    }
  });
  return [...minutes]
    .sort((a, b) => b[0] - a[0])
    .map(([time, lists]) => ({
      time,
      values: lists.map((list) => (list.length ? list.reduce((a, b) => a + b) / list.length : null)),
    }));
}
