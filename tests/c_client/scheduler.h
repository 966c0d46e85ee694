// A scheduler of docs/protocol.md: what it is lent, what it says in a step, what it finds.
#pragma once

#include "directory.h"
#include "wire.h"

enum { CHUNKS = 2, MOST_SLOTS = 64, LEASE = 1 };

// Slots with the generations that they had when they were lent or found.
struct slots {
  size_t count;
  uint64_t slots[MOST_SLOTS], generations[MOST_SLOTS];
};

struct scheduler {
  struct connection session;
  struct directory directory;
  struct slots loans;  // slots that the broker has lent and that no key was given yet
};

// What a scheduler says in one message; what is NULL or 0 is left out.
struct said {
  const char *const *keys, *const *dropped, *const *used;  // CHUNKS of each
  const struct slots *given, *pinned;                      // to the keys; by lease LEASE
  uint64_t unpinned, wanted;
};

void put_slots(struct body *body, const struct slots *slots);
// A scheduler in a real engine would not wait for the answer; here it is, for what it lends.
void say(struct scheduler *scheduler, struct said said);
// Takes so many of the slots on loan that still are, asking for more where too few are left.
struct slots take_loans(struct scheduler *scheduler, size_t count);
// Where the chunks of these CHUNKS keys lie; dies where one is not READY.
struct slots find_chunks(struct scheduler *scheduler, const char *const *keys);
// Done comes before READY: asks the directory about CHUNKS keys until it says so of each.
void await_lookup(struct scheduler *scheduler, const char *const *keys, enum lookup expected);
