// Frames, messages and sockets of docs/protocol.md. Whatever goes wrong ends the program (die).
#pragma once

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HEADER_BYTES = 48, ID_BYTES = 16, PROTOCOL_VERSION = 3, PATIENCE_MS = 30000 };

enum tag {
  HELLO = 0x01, WELCOME, REGISTER, REGISTERED, UNREGISTER,
  STEP = 0x10, STEPPED, RESET, RESET_DONE,
  STORE = 0x20, LOAD, DONE,
  PING = 0x30, PONG,
  OK = 0x3E, ERROR, GREETING, ATTACHED, DETACHED, LANE_UP,
};

// Says what went wrong on stderr and exits with status 1.
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Milliseconds of a clock that only goes forward.
int64_t now_ms(void);
uint64_t little_endian(const uint8_t *at, size_t width);

// A message that arrived, with the descriptor that came along, or -1.
struct message {
  enum tag tag;
  uint64_t request_id;
  uint8_t boot_id[ID_BYTES], token[ID_BYTES];
  msgpack_unpacked body;
  char *frame;
  int fd;
};

void message_free(struct message *message);
// Fields by name; they die where there is no such field or it is of another type.
uint64_t number(const struct message *message, const char *name);  // an integer or a boolean
void copy_text(const struct message *message, const char *name, char *into, size_t size);
// Reads an integer array of `most` items or fewer; how many it has.
size_t integers(const struct message *message, const char *name, uint64_t *into, size_t most);

// A message's body while it is written.
struct body {
  msgpack_sbuffer buffer;
  msgpack_packer pack;
};

void body_begin(struct body *body, size_t fields);
void put_name(struct body *body, const char *name);
void put_text(struct body *body, const char *name, const char *text);
void put_number(struct body *body, const char *name, uint64_t value);
void put_keys(struct body *body, const char *name, const char *const *keys, size_t count);
// Packs values as `u4` or `u8`: `width` is 4 or 8.
void put_integers(struct body *body, const char *name, const uint64_t *values, size_t count,
                  size_t width);

// One session: its control socket, its request socket, and what notices have brought.
struct session {
  void *context, *requests;
  int control;
  uint64_t last_id;
  uint8_t boot_id[ID_BYTES], token[ID_BYTES];
  char runtime_dir[256];
  int directory;  // of the last Attached, or -1
  int lifeline;   // of the last LaneUp, or -1
  char endpoint[256];
};

// Connects, reads Greeting, says Hello.
void session_open(struct session *session, const char *runtime_dir, const char *kind,
                  const char *engine);
void session_close(struct session *session);
// Reads notices until `*what` is no longer `before`.
void await_notice(struct session *session, const int *what, int before);

// A lane's socket, for the session of a worker.
struct lane {
  struct session *session;
  void *jobs;
  uint64_t last_id;
};

void lane_open(struct lane *lane, struct session *session);

// Sends a body and frees it; the request's id.
uint64_t ask_lane(struct lane *lane, enum tag tag, struct body *body);
// The reply to a request; dies where it is of another type.
struct message answer(struct session *session, void *socket, uint64_t id, enum tag tag);
// Both at once, for the broker and for a lane.
struct message exchange(struct session *session, enum tag tag, struct body *body, enum tag reply);
// A request with descriptors, which goes over the control socket; its reply does not.
struct message exchange_with_fds(struct session *session, enum tag tag, struct body *body,
                                 const int *fds, size_t count, enum tag reply);
struct message exchange_lane(struct lane *lane, enum tag tag, struct body *body, enum tag reply);
