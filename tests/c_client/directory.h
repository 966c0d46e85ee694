// The directory of chunks, as docs/protocol.md describes it: read only, without a lock.
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum lookup { MISS, HIT, HIT_PENDING };

struct directory {
  const uint8_t *bytes;
  uint64_t size;
  uint32_t slots, capacity, probe_limit, blocks_per_chunk;
  uint64_t records, index;
};

// Maps the file and checks its header; dies where it is no directory.
void directory_map(struct directory *directory, int fd);
void directory_unmap(struct directory *directory);
// A whole chunk: one that holds only some of its blocks is a miss. Of a hit, where it lies goes
// to `slot` and `generation`, unless they are NULL.
enum lookup directory_find(const struct directory *directory, const char *key, uint64_t *slot,
                           uint64_t *generation);
// Whether a slot is still on loan as it was lent.
bool directory_lent(const struct directory *directory, uint64_t slot, uint64_t generation);
