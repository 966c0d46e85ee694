"""A live miss-ratio curve: the share of prompts that a pool of another size would have found.

The curve is that of an LRU cache whose chunks are refreshed once a request, a prompt's head last
(hottest). No chunk is colder there than one behind it in its prompt, so the chunks that are found
are a prefix of the prompt, and Mattson's stack distances are exact: a pool finds a chunk if fewer
chunks than it holds are hotter. (R. L. Mattson et al., Evaluation techniques for storage
hierarchies, 1970.)

Keys of the hottest chunks are all kept, up to a quarter of the pool: a system prompt that is in
every request is counted exactly. There are two samples of the rest, since prompts share heads:

- By group: the first key of a prompt counts 1. Of each group of 20 keys behind it one counts 20,
  chosen by the hash of the group's first key, so the same one in all prompts that share it.
- By own hash: one key of 20 counts 20. This one counts the cold keys of a group that begins with
  hot ones: by group all its prompts would be sampled at the same position. Distances are weights of
  this sample, too.

Groups are smaller where the pool has few chunks.

The last uses of keys are kept in buckets, one for each request or for several small ones. A
distance is the weight of all newer buckets. Small buckets are merged with their neighbours, so
there are at most `MAX_BUCKETS`, whatever the pool holds. The oldest buckets are forgotten beyond
the lookback.

All sums are halved after each hour with lookups, so recent requests count most.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvd.errors import IntegrityError

SAMPLE_EVERY = 20
LARGEST_POOL = 4  # times the chunks of this one: pools of more chunks count as without limit
MIN_POOL_SAMPLE = 2048  # keys of the pool's chunks that are sampled at least, if it has so many
HOTTEST_CHUNKS = 4096  # of which all keys are kept, or a quarter of the pool's
MIN_LOOKBACK_CHUNKS = 1 << 17
BINS_PER_POOL = 64
BINS = LARGEST_POOL * BINS_PER_POOL
MAX_BUCKETS = 2048  # more than merging leaves: 2 * BINS_PER_POOL * (1 + ln(lookback / pool))
KEYS_PER_CHUNK = 0.25  # of the lookback; only prompts of 1 to 6 chunks have more sampled keys
SHARD_KEYS = 4096  # that one piece of `tidy` looks at
HALVING_SECONDS = 3600.0


class Bucket:
    """Sampled keys that were last used at about the same time.

    place: index among the buckets, oldest first; -1: forgotten.
    num_keys: how many keys were last used then.
    merged_into: the bucket that counts its keys now; None: itself.
    """

    __slots__ = ("merged_into", "num_keys", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.num_keys = 0
        self.merged_into: Bucket | None = None


class MissCurve:
    """The curve of one namespace.

    Args:
        chunks: that the pool can hold, 1 or more.
        sample_every: keys of which one is taken; 1: all are; None: by the pool's chunks.

    Attributes:
        num_keys: sampled keys that it knows.
        requests: finished requests that it is made of.
        asked: prompt keys of these requests.
        hottest: of `asked`, those at the head of a prompt that were among the hottest.
        tokens, hit_tokens: that engines looked up and found in the same time.
        seconds: of that time.
        tokens_per_key: None where it is not known.
    """

    def __init__(self, chunks: int, sample_every: int | None = None) -> None:
        by_chunks = max(1, min(SAMPLE_EVERY, chunks // MIN_POOL_SAMPLE))
        self._every = by_chunks if sample_every is None else sample_every
        self._bin_chunks = chunks / BINS_PER_POOL
        self._lookback = max(LARGEST_POOL * chunks, MIN_LOOKBACK_CHUNKS)
        self._max_keys = round(self._lookback * max(KEYS_PER_CHUNK, 1 / self._every))
        self._num_hottest = min(HOTTEST_CHUNKS, chunks // 4)
        self._hottest: OrderedDict[bytes, None] = OrderedDict()  # hottest last
        # Sampled keys, by hash. In shards: a dictionary that grows moves all that it has.
        num_shards = -(-self._max_keys // SHARD_KEYS)
        self._shards: list[dict[int, Bucket]] = [{} for _ in range(num_shards)]
        self._buckets = [Bucket(0)]
        self._weights = np.zeros(MAX_BUCKETS, np.int64)  # in chunks, by the bucket's place
        self._oldest = 0  # buckets before this place are forgotten
        self._weight = self.num_keys = self._num_forgotten = 0
        self._next_shard = self._shards_left = 0
        # Of sampled prompt keys that were not among the hottest: weights, and weights times
        # positions; and of these, those that were used before by distance, in the last bin all of
        # the largest pool and more.
        self._sampled = self._sampled_depths = 0.0
        self._hits = [0.0] * (BINS + 1)
        self._hit_depths = [0.0] * (BINS + 1)
        self.requests = self.asked = self.hottest = 0.0
        self.tokens = self.hit_tokens = self.seconds = 0.0
        self.tokens_per_key: float | None = None
        self._noted_at: float | None = None
        self._until_halving = HALVING_SECONDS

    # ----------------------------------------------------------------- feeding

    def record(self, keys: Sequence[bytes], prompt: int) -> None:
        """Take in a finished request.

        Args:
            keys: of all chunks that its tokens fill, a prompt's head first.
            prompt: how many of them, from the first on, were asked for.
        """
        if not keys:
            return
        prompt = min(prompt, len(keys))
        self.requests += 1
        self.asked += prompt
        hottest = self._refresh_hottest(keys, prompt)
        self.hottest += hottest
        every = self._every
        # From this position on no group has any of the hottest. Without groups there is none.
        cold_groups = 1 + math.ceil((hottest - 1) / every) * every if hottest else 0
        if every == 1:
            cold_groups = len(keys)
        sample = self._sample(keys)
        leaving: dict[Bucket, tuple[int, int]] = {}  # keys and weight that leave each bucket
        run: Bucket | None = None
        distance = 0
        for key, (position, weight) in sample.items():
            by_own_hash = weight > 0
            count = 0
            if hottest <= position < prompt and by_own_hash == (position < cold_groups):
                count = every if position else 1
            self._sampled += count
            self._sampled_depths += count * position
            bucket = self._bucket_of(key)
            if bucket is None:
                continue
            if bucket is not run:
                run = bucket
                distance = int(self._weights[bucket.place + 1 : len(self._buckets)].sum())
            if count:
                place = min(BINS, int(distance / self._bin_chunks))
                self._hits[place] += count
                self._hit_depths[place] += count * position
            distance += weight  # keys ahead in the same prompt are hotter
            num_left, weight_left = leaving.get(bucket, (0, 0))
            leaving[bucket] = num_left + 1, weight_left + weight
        for bucket, (num_keys, weight) in leaving.items():
            self._add(bucket, -num_keys, -weight)
        self._enter(sample)
        self._forget_oldest()
        if self._num_forgotten > self.num_keys // 2:  # nobody has called `tidy`
            self.tidy()

    def _refresh_hottest(self, keys: Sequence[bytes], prompt: int) -> int:
        """Make these keys the hottest; how many of the prompt's head were among the hottest."""
        hottest, found = self._hottest, 0
        while found < prompt and keys[found] in hottest:
            found += 1
        for key in reversed(keys[: self._num_hottest]):
            hottest[key] = None
            hottest.move_to_end(key)
        while len(hottest) > self._num_hottest:
            hottest.popitem(last=False)
        return found

    def _sample(self, keys: Sequence[bytes]) -> dict[int, tuple[int, int]]:
        """Position and weight of each sampled key, by a hash of it, in the prompt's order.

        Those of the sample by group have no weight, and are filed under other hashes.
        """
        every, hashes = self._every, list(map(hash, keys))
        if every == 1:
            return {own: (position, 1) for position, own in enumerate(hashes)}
        sample = {~hashes[0]: (0, 0)}
        chosen = 0
        for position, own in enumerate(hashes):
            if (position - 1) % every == 0:
                chosen = position + own % every
            if position == chosen and position:
                sample.setdefault(own ^ 1, (position, 0))
            if own % every == 0:
                sample.setdefault(own, (position, every))
        return sample

    def _bucket_of(self, key: int) -> Bucket | None:
        """The bucket that counts the key; None: it was not used, or that is forgotten."""
        shard = self._shards[key % len(self._shards)]
        bucket = shard.get(key)
        if bucket is None:
            return None
        bucket = _root(bucket)
        if bucket.place >= 0:
            return bucket
        del shard[key]
        self._num_forgotten -= 1
        return None

    def _enter(self, sample: dict[int, tuple[int, int]]) -> None:
        """Put the keys into the newest bucket, or into a new one where that has enough."""
        weight = sum(weight for _, weight in sample.values())
        newest = self._buckets[-1]
        if self._weights[newest.place] + weight > self._bin_chunks:
            if len(self._buckets) == MAX_BUCKETS:
                self._merge_buckets()
            newest = Bucket(len(self._buckets))
            self._buckets.append(newest)
        shards, num_shards = self._shards, len(self._shards)
        for key in sample:
            shards[key % num_shards][key] = newest
        self._add(newest, len(sample), weight)

    def _add(self, bucket: Bucket, num_keys: int, weight: int) -> None:
        bucket.num_keys += num_keys
        self.num_keys += num_keys
        self._weights[bucket.place] += weight
        self._weight += weight

    def note_lookups(self, tokens: int, hit_tokens: int, now: float) -> None:
        """Take in what engines have looked up since the last call, at `now` in monotonic seconds.

        After an hour all sums are halved. More than an hour between two calls counts as one hour.
        """
        gap = 0.0 if self._noted_at is None else min(now - self._noted_at, HALVING_SECONDS)
        self._noted_at = now
        self.tokens += tokens
        self.hit_tokens += hit_tokens
        self.seconds += gap
        self._until_halving -= gap
        if self._until_halving <= 0:
            self._until_halving = HALVING_SECONDS
            self._halve()

    def _halve(self) -> None:
        self._hits = [weight / 2 for weight in self._hits]
        self._hit_depths = [depth / 2 for depth in self._hit_depths]
        self.requests /= 2
        self.asked /= 2
        self.hottest /= 2
        self._sampled /= 2
        self._sampled_depths /= 2
        self.tokens /= 2
        self.hit_tokens /= 2
        self.seconds /= 2

    # ------------------------------------------------------------------ upkeep

    def tidy(self) -> bool:
        """Do one bounded piece of upkeep, in spare time; whether more is due."""
        if len(self._buckets) > 3 * MAX_BUCKETS // 4:
            self._merge_buckets()
        elif self._shards_left:
            self._drop_forgotten_keys(self._next_shard)
            self._next_shard = (self._next_shard + 1) % len(self._shards)
            self._shards_left -= 1
        elif self._num_forgotten > self.num_keys // 4:
            self._shards_left = len(self._shards)
        return self._shards_left > 0

    def _forget_oldest(self) -> None:
        while (self._weight > self._lookback or self.num_keys > self._max_keys) and (
            self._oldest < len(self._buckets) - 1
        ):
            bucket = self._buckets[self._oldest]
            self._num_forgotten += bucket.num_keys
            self._add(bucket, -bucket.num_keys, -int(self._weights[bucket.place]))
            bucket.place = -1
            self._oldest += 1

    def _merge_buckets(self) -> None:
        """Merge neighbours that are small together, and number the buckets anew.

        The resolution is a bin, and behind the pool's chunks a part of the distance.
        """
        buckets = [self._buckets[-1]]
        weights = self._weights[: len(self._buckets)].tolist()
        merged = [weights[-1]]  # newest first, as `buckets`
        newer = 0
        for place in range(len(weights) - 2, self._oldest - 1, -1):
            bucket = self._buckets[place]
            limit = max(self._bin_chunks, newer / BINS_PER_POOL)
            if merged[-1] + weights[place] <= limit:
                buckets[-1] = _merge(buckets[-1], bucket)
                merged[-1] += weights[place]
            else:
                newer += merged[-1]
                buckets.append(bucket)
                merged.append(weights[place])
        buckets.reverse()
        for place, bucket in enumerate(buckets):
            bucket.place = place
        self._buckets, self._oldest = buckets, 0
        self._weights[:] = 0
        self._weights[: len(merged)] = merged[::-1]

    def _drop_forgotten_keys(self, number: int) -> None:
        shard = self._shards[number]
        current = ((key, _root(bucket)) for key, bucket in shard.items())
        self._shards[number] = {key: bucket for key, bucket in current if bucket.place >= 0}
        self._num_forgotten -= len(shard) - len(self._shards[number])

    # ----------------------------------------------------------------- answers

    def hit_ratio(self, chunks: float) -> float:
        """Share of prompt keys that a pool of so many chunks would have found.

        A pool below a quarter of this one counts as such a quarter, one of `LARGEST_POOL` times
        this one and more as one without limit.
        """
        if not self.asked:
            return 0.0
        found = self._below(self._hits, chunks) / self._sampled if self._sampled else 0.0
        return (self.hottest + (self.asked - self.hottest) * found) / self.asked

    @property
    def ceiling(self) -> float:
        """Share of prompt keys that a pool without limit would have found."""
        return self.hit_ratio(math.inf)

    @property
    def first_time(self) -> float:
        """Share of prompt keys that no request had before, as far back as the curve looks."""
        return 1.0 - self.ceiling if self.asked else 0.0

    def missed_depth(self, chunks: float) -> float:
        """Mean position in their prompts of the keys that such a pool would miss; 0: none would."""
        missed = self._sampled - self._below(self._hits, chunks)
        depths = self._sampled_depths - self._below(self._hit_depths, chunks)
        return depths / missed if missed > 0.5 else 0.0

    def _below(self, sums: Sequence[float], chunks: float) -> float:
        """Sum over distances below `chunks`, with a part of the bin where that lies."""
        place = max(chunks / self._bin_chunks, BINS_PER_POOL / 4)
        if place >= BINS:
            return sum(sums)
        ends = np.concatenate(([0.0], np.cumsum(sums[:BINS])))
        return float(np.interp(place, np.arange(BINS + 1), ends))

    # -------------------------------------------------------------- inspection

    def check_integrity(self) -> None:
        """Raise IntegrityError where keys, buckets and sums contradict each other."""
        buckets = self._buckets[self._oldest :]
        num_keys = dict.fromkeys(buckets, 0)
        forgotten = 0
        for shard in self._shards:
            for bucket in map(_root, shard.values()):
                if bucket.place < 0:
                    forgotten += 1
                else:
                    num_keys[bucket] += 1
        if any(bucket.num_keys != found for bucket, found in num_keys.items()):
            raise IntegrityError(f"{self!r}: buckets count other keys than those filed there")
        if (sum(num_keys.values()), forgotten) != (self.num_keys, self._num_forgotten):
            raise IntegrityError(f"{self!r} has {num_keys} keys and {forgotten} forgotten ones")
        if any(after.place != before.place + 1 for before, after in pairwise(buckets)):
            raise IntegrityError(f"{self!r}: buckets are out of order")
        if int(self._weights.sum()) != self._weight or self._weights.min() < 0:
            raise IntegrityError(f"{self!r}: buckets weigh {int(self._weights.sum())}")
        if len(buckets) > 1 and (self._weight > self._lookback or self.num_keys > self._max_keys):
            raise IntegrityError(f"{self!r} looks back too far")

    def __repr__(self) -> str:
        return (
            f"<MissCurve of {self.requests:.0f} requests: {self.num_keys} keys for {self._weight}"
            f" chunks, in {len(self._buckets) - self._oldest} buckets>"
        )


def _root(bucket: Bucket) -> Bucket:
    """The bucket that counts this one's keys now."""
    while bucket.merged_into is not None:
        bucket = bucket.merged_into
    return bucket


def _merge(one: Bucket, other: Bucket) -> Bucket:
    """Merge the bucket of fewer keys into the other one, so that chains stay short."""
    small, large = (one, other) if one.num_keys <= other.num_keys else (other, one)
    small.merged_into = large
    large.num_keys += small.num_keys
    small.num_keys = 0
    return large
