"""A live miss-ratio curve: which share of prompt keys a pool of another size would have found.

**Model.** An LRU cache whose chunks are refreshed once per request, a prompt's head last (hottest).
There no chunk is colder than one behind it in its prompt, so the chunks found are a prefix of the
prompt, and Mattson's stack distances are exact: a pool finds a chunk if fewer chunks than it holds
are hotter. (R. L. Mattson et al., Evaluation techniques for storage hierarchies, 1970.)

**Sampling.** The keys of the hottest chunks, up to a quarter of the pool, are all kept, so a system
prompt in every request is counted exactly. The rest is sampled twice, because prompts share heads:

- By group: the first key of a prompt counts 1. Of each group of 20 keys behind it one counts 20,
  chosen by the hash of the group's first key, so the same one in all prompts that share the group.
- By own hash: one key of 20 counts 20. This sample is used for the cold keys of a group that begins
  with hot ones, which by group would be sampled at the same position in all prompts. It also gives
  the weights for distances.

Groups are smaller if the pool has few chunks.

**Distances.** The last uses of keys are kept in buckets, one for each request or for several small
ones. A distance is the weight of all newer buckets. Small buckets are merged with their neighbours,
so there are at most `MAX_BUCKETS` for any pool. Buckets beyond the lookback are forgotten.

All sums are halved after each hour with lookups, so recent requests count most.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvd.errors import IntegrityError

SAMPLE_EVERY = 20
LARGEST_POOL = 4  # times the chunks of this pool; larger pools count as unlimited
MIN_POOL_SAMPLE = 2048  # at least so many of the pool's keys are sampled, if it has so many
HOTTEST_CHUNKS = 4096  # whose keys are all kept; at most a quarter of the pool's chunks
MIN_LOOKBACK_CHUNKS = 1 << 17
BINS_PER_POOL = 64
BINS = LARGEST_POOL * BINS_PER_POOL
MAX_BUCKETS = 2048  # merging leaves fewer: 2 * BINS_PER_POOL * (1 + ln(lookback / pool))
KEYS_PER_CHUNK = 0.25  # of the lookback; only prompts of 1 to 6 chunks have more sampled keys
SHARD_KEYS = 4096  # looked at by one piece of `tidy`
HALVING_SECONDS = 3600.0


class Bucket:
    """Sampled keys that were last used at about the same time.

    place: index in the list of buckets, oldest first; -1: forgotten.
    num_keys: number of these keys.
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
        sample_every: one key of so many is sampled; None: by the pool's chunks.

    Attributes:
        num_keys: number of sampled keys in buckets.
        requests: number of finished requests in the curve.
        prompt_keys: prompt keys of these requests.
        hottest: of `prompt_keys`, those at the head of a prompt that were among the hottest.
        lookup_tokens, hit_tokens: that engines looked up and found in the same time.
        seconds: length of that time.
        tokens_per_key: None: not known.
    """

    def __init__(self, chunks: int, sample_every: int | None = None) -> None:
        by_chunks = max(1, min(SAMPLE_EVERY, chunks // MIN_POOL_SAMPLE))
        self._every = by_chunks if sample_every is None else sample_every
        self._bin_chunks = chunks / BINS_PER_POOL
        self._lookback = max(LARGEST_POOL * chunks, MIN_LOOKBACK_CHUNKS)
        self._max_keys = round(self._lookback * max(KEYS_PER_CHUNK, 1 / self._every))
        self._num_hottest = min(HOTTEST_CHUNKS, chunks // 4)
        self._hottest: OrderedDict[bytes, None] = OrderedDict()  # hottest last
        # Sampled keys, by hash. In shards, because a growing dictionary moves all its keys at once.
        num_shards = -(-self._max_keys // SHARD_KEYS)
        self._shards: list[dict[int, Bucket]] = [{} for _ in range(num_shards)]
        self._buckets = [Bucket(0)]
        self._weights = np.zeros(MAX_BUCKETS, np.int64)  # in chunks, by the bucket's place
        self._oldest = 0  # buckets before this place are forgotten
        self._weight = self.num_keys = self._num_forgotten = 0
        self._next_shard = self._shards_left = 0
        # Of sampled prompt keys that were not among the hottest: sums of weights, and of weights
        # times positions. For those used before, the same by distance; the last bin has distances
        # of the largest pool and more.
        self._sampled = self._sampled_positions = 0.0
        self._hits = [0.0] * (BINS + 1)
        self._hit_positions = [0.0] * (BINS + 1)
        self.requests = self.prompt_keys = self.hottest = 0.0
        self.lookup_tokens = self.hit_tokens = self.seconds = 0.0
        self.tokens_per_key: float | None = None
        self._noted_at: float | None = None
        self._until_halving = HALVING_SECONDS

    # ----------------------------------------------------------------- feeding

    def record(self, keys: Sequence[bytes], num_prompt: int) -> None:
        """Add a finished request.

        Args:
            keys: of all chunks that its tokens fill, a prompt's head first.
            num_prompt: how many of them, from the first on, are the prompt's.
        """
        if not keys:
            return
        num_prompt = min(num_prompt, len(keys))
        self.requests += 1
        self.prompt_keys += num_prompt
        hottest = self._refresh_hottest(keys, num_prompt)
        self.hottest += hottest
        every = self._every
        # From this position on no group has hottest keys. With `every` 1 there are no groups.
        cold_from = 1 + math.ceil((hottest - 1) / every) * every if hottest else 0
        if every == 1:
            cold_from = len(keys)
        sample = self._sample(keys)
        moved: dict[Bucket, tuple[int, int]] = {}  # bucket -> number and weight of keys that leave
        last_bucket: Bucket | None = None
        distance = 0
        for key, (position, weight) in sample.items():
            by_key_hash = weight > 0
            count = 0
            if hottest <= position < num_prompt and by_key_hash == (position < cold_from):
                count = every if position else 1
            self._sampled += count
            self._sampled_positions += count * position
            bucket = self._bucket_of(key)
            if bucket is None:
                continue
            if bucket is not last_bucket:
                last_bucket = bucket
                distance = int(self._weights[bucket.place + 1 : len(self._buckets)].sum())
            if count:
                bin_ = min(BINS, int(distance / self._bin_chunks))
                self._hits[bin_] += count
                self._hit_positions[bin_] += count * position
            distance += weight  # keys ahead in the same prompt are hotter
            num_moved, weight_moved = moved.get(bucket, (0, 0))
            moved[bucket] = num_moved + 1, weight_moved + weight
        for bucket, (num_keys, weight) in moved.items():
            self._add(bucket, -num_keys, -weight)
        self._insert(sample)
        self._forget_oldest()
        if self._num_forgotten > self.num_keys // 2:  # `tidy` was not called often enough
            self.tidy()

    def _refresh_hottest(self, keys: Sequence[bytes], num_prompt: int) -> int:
        """Make these keys the hottest; return how many of its head were so before."""
        hottest, num_hottest = self._hottest, 0
        while num_hottest < num_prompt and keys[num_hottest] in hottest:
            num_hottest += 1
        for key in reversed(keys[: self._num_hottest]):
            hottest[key] = None
            hottest.move_to_end(key)
        while len(hottest) > self._num_hottest:
            hottest.popitem(last=False)
        return num_hottest

    def _sample(self, keys: Sequence[bytes]) -> dict[int, tuple[int, int]]:
        """Return position and weight of each sampled key, by a hash of it, in the prompt's order.

        Keys of the sample by group have weight 0 and modified hashes, to tell the samples apart.
        """
        every, hashes = self._every, list(map(hash, keys))
        if every == 1:
            return {key_hash: (position, 1) for position, key_hash in enumerate(hashes)}
        sample = {~hashes[0]: (0, 0)}
        chosen = -1
        for position, key_hash in enumerate(hashes):
            if (position - 1) % every == 0:
                chosen = position + key_hash % every
            if position == chosen:
                sample.setdefault(key_hash ^ 1, (position, 0))
            if key_hash % every == 0:
                sample.setdefault(key_hash, (position, every))
        return sample

    def _bucket_of(self, key: int) -> Bucket | None:
        """Return the bucket that counts the key; None: it was not used, or was forgotten."""
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

    def _insert(self, sample: dict[int, tuple[int, int]]) -> None:
        """Put the keys into the newest bucket, or into a new one if that is full."""
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
        """Add engines' lookups since the last call; `now`: monotonic seconds.

        After an hour all sums are halved. More than an hour between two calls counts as an hour.
        """
        gap = 0.0 if self._noted_at is None else min(now - self._noted_at, HALVING_SECONDS)
        self._noted_at = now
        self.lookup_tokens += tokens
        self.hit_tokens += hit_tokens
        self.seconds += gap
        self._until_halving -= gap
        if self._until_halving <= 0:
            self._until_halving = HALVING_SECONDS
            self._halve()

    def _halve(self) -> None:
        """Halve all sums: lookups of an hour ago then count half."""
        self._hits = [weight / 2 for weight in self._hits]
        self._hit_positions = [position / 2 for position in self._hit_positions]
        self.requests /= 2
        self.prompt_keys /= 2
        self.hottest /= 2
        self._sampled /= 2
        self._sampled_positions /= 2
        self.lookup_tokens /= 2
        self.hit_tokens /= 2
        self.seconds /= 2

    # ------------------------------------------------------------------ upkeep

    def tidy(self) -> bool:
        """Do one bounded piece of upkeep; return whether more is due."""
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
        """Merge small neighbours, and renumber the buckets.

        A merged bucket has the weight of a bin at most, or, for distances beyond the pool's chunks,
        of a fixed part of the distance.
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
        """Return the share of prompt keys that a pool of `chunks` chunks would have found.

        A pool below a quarter of this one counts as a quarter of it, a pool of `LARGEST_POOL` times
        this one or more as unlimited.
        """
        if not self.prompt_keys:
            return 0.0
        sampled_ratio = self._below(self._hits, chunks) / self._sampled if self._sampled else 0.0
        return (self.hottest + (self.prompt_keys - self.hottest) * sampled_ratio) / self.prompt_keys

    @property
    def ceiling(self) -> float:
        """The share of prompt keys that an unlimited pool would have found."""
        return self.hit_ratio(math.inf)

    @property
    def first_time(self) -> float:
        """The share of prompt keys that no request had before, within the lookback."""
        return 1.0 - self.ceiling if self.prompt_keys else 0.0

    def missed_depth(self, chunks: float) -> float:
        """Return the mean position in its prompt of a key that such a pool misses; 0: none is."""
        missed = self._sampled - self._below(self._hits, chunks)
        positions = self._sampled_positions - self._below(self._hit_positions, chunks)
        return positions / missed if missed > 0.5 else 0.0

    def _below(self, sums: Sequence[float], chunks: float) -> float:
        """Return the sum over distances below `chunks`, interpolated within a bin."""
        num_bins = max(chunks / self._bin_chunks, BINS_PER_POOL / 4)
        if num_bins >= BINS:
            return sum(sums)
        ends = np.concatenate(([0.0], np.cumsum(sums[:BINS])))
        return float(np.interp(num_bins, np.arange(BINS + 1), ends))

    # -------------------------------------------------------------- inspection

    def check_integrity(self) -> None:
        """Raise IntegrityError if keys, buckets and sums contradict each other."""
        buckets = self._buckets[self._oldest :]
        num_keys = dict.fromkeys(buckets, 0)
        num_forgotten = 0
        for shard in self._shards:
            for bucket in map(_root, shard.values()):
                if bucket.place < 0:
                    num_forgotten += 1
                else:
                    num_keys[bucket] += 1
        if any(bucket.num_keys != filed for bucket, filed in num_keys.items()):
            raise IntegrityError("miss curve: buckets count other keys than those filed there")
        filed = (sum(num_keys.values()), num_forgotten)
        counted = (self.num_keys, self._num_forgotten)
        if filed != counted:
            raise IntegrityError(f"miss curve: keys and forgotten keys are {filed}, not {counted}")
        if any(after.place != before.place + 1 for before, after in pairwise(buckets)):
            raise IntegrityError("miss curve: buckets are out of order")
        weight = int(self._weights.sum())
        if weight != self._weight or self._weights.min() < 0:
            raise IntegrityError(f"miss curve: buckets weigh {weight}, not {self._weight}")
        if len(buckets) > 1 and (self._weight > self._lookback or self.num_keys > self._max_keys):
            raise IntegrityError(f"miss curve: {self._weight} chunks exceed the lookback")


def _root(bucket: Bucket) -> Bucket:
    """Return the bucket that counts this one's keys now."""
    while bucket.merged_into is not None:
        bucket = bucket.merged_into
    return bucket


def _merge(first: Bucket, second: Bucket) -> Bucket:
    """Merge the bucket of fewer keys into the other, so that chains stay short; return that."""
    small, large = (first, second) if first.num_keys <= second.num_keys else (second, first)
    small.merged_into = large
    large.num_keys += small.num_keys
    small.num_keys = 0
    return large
