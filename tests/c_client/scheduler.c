#define _GNU_SOURCE
#include "scheduler.h"

#include <time.h>

enum { WANTED = 2 * CHUNKS };
static const struct timespec PAUSE = {.tv_nsec = 1000000};

void put_slots(struct body *body, const struct slots *slots) {
  put_integers(body, "slots", slots->slots, slots->count, 4);
  put_integers(body, "generations", slots->generations, slots->count, 8);
}

void say(struct scheduler *scheduler, struct said said) {
  struct body body;
  struct slots *loans = &scheduler->loans;
  body_begin(&body, (said.keys ? 3 : 0) + !!said.dropped + !!said.used + !!said.pinned +
                        !!said.unpinned + !!said.wanted);
  if (said.keys) {
    put_keys(&body, "keys", said.keys, CHUNKS);
    put_slots(&body, said.given);
  }
  if (said.dropped) put_keys(&body, "dropped", said.dropped, CHUNKS);
  if (said.used) put_keys(&body, "used", said.used, CHUNKS);
  if (said.pinned) {
    put_name(&body, "pins");
    msgpack_pack_array(&body.pack, 1);
    msgpack_pack_map(&body.pack, 4);
    put_number(&body, "lease", LEASE);
    put_number(&body, "lease_ms", 2 * PATIENCE_MS);
    put_slots(&body, said.pinned);
  }
  if (said.unpinned) {
    put_name(&body, "unpinned");
    msgpack_pack_array(&body.pack, 1);
    msgpack_pack_uint64(&body.pack, said.unpinned);
  }
  if (said.wanted) put_number(&body, "wanted", said.wanted);
  struct message reply = exchange(&scheduler->session, STEP, &body, STEPPED);
  size_t more = integers(&reply, "slots", loans->slots + loans->count, MOST_SLOTS - loans->count);
  if (integers(&reply, "generations", loans->generations + loans->count, more) != more)
    die("as many generations as slots are due");
  loans->count += more;
  message_free(&reply);
}

// The broker may have taken some back without a message: the directory says so.
struct slots take_loans(struct scheduler *scheduler, size_t count) {
  struct slots *loans = &scheduler->loans, taken = {0};
  int64_t end = now_ms() + PATIENCE_MS;
  while (taken.count < count) {
    if (!loans->count) {
      if (now_ms() >= end) die("no slot was lent for %d ms", PATIENCE_MS);
      say(scheduler, (struct said){.wanted = WANTED});
      if (!loans->count) nanosleep(&PAUSE, NULL);
      continue;
    }
    uint64_t slot = loans->slots[--loans->count], generation = loans->generations[loans->count];
    if (!directory_lent(&scheduler->directory, slot, generation)) continue;
    taken.slots[taken.count] = slot;
    taken.generations[taken.count++] = generation;
  }
  return taken;
}

struct slots find_chunks(struct scheduler *scheduler, const char *const *keys) {
  struct slots found = {.count = CHUNKS};
  for (int i = 0; i < CHUNKS; i++)
    if (directory_find(&scheduler->directory, keys[i], &found.slots[i], &found.generations[i]) !=
        HIT)
      die("%s is not READY", keys[i]);
  return found;
}

void await_lookup(struct scheduler *scheduler, const char *const *keys, enum lookup expected) {
  int64_t end = now_ms() + PATIENCE_MS;
  for (int i = 0; i < CHUNKS; i++)
    while (directory_find(&scheduler->directory, keys[i], NULL, NULL) != expected) {
      if (now_ms() >= end) die("%s is not in the state that is due", keys[i]);
      nanosleep(&PAUSE, NULL);
    }
}
