// Frames, messages and connections of docs/protocol.md. Whatever goes wrong ends the program (die).
#pragma once

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HEADER_BYTES = 16, TOKEN_BYTES = 16, PROTOCOL_VERSION = 4, PATIENCE_MS = 30000 };

enum tag {
  HELLO = 0x01, WELCOME, REGISTER, REGISTERED, UNREGISTER,
  STEP = 0x10, STEPPED, RESET, RESET_DONE,
  STORE = 0x20, LOAD, DONE, JOIN = 0x27,
  PING = 0x30, PONG,
  OK = 0x3E, ERROR, ATTACHED = 0x41, DETACHED, LANE_UP,
};

// Says what went wrong on stderr and exits with status 1.
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Milliseconds of a clock that only goes forward.
int64_t now_ms(void);
uint64_t little_endian(const uint8_t *at, size_t width);

// A message that arrived, with the first descriptor that came along, or -1.
struct message {
  enum tag tag;
  uint64_t request_id;
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

// A connection to the broker or to a lane, and what the broker's notices have brought.
struct connection {
  int socket;
  uint64_t last_id;
  int directory;               // of the last Attached, or -1
  int lifeline;                // of the last LaneUp, or -1
  char endpoint[256];          // of the same
  uint8_t token[TOKEN_BYTES];  // of the same
};

// Connects and says Hello.
void session_open(struct connection *session, const char *runtime_dir, const char *kind,
                  const char *engine);
// Connects to the lane that a worker was told of, and joins it.
void lane_open(struct connection *lane, const struct connection *worker);
void connection_close(struct connection *connection);

// Sends a body and frees it; the request's id.
uint64_t ask(struct connection *connection, enum tag tag, struct body *body);
uint64_t ask_with_fds(struct connection *connection, enum tag tag, struct body *body,
                      const int *fds, size_t count);
// The reply to a request; dies where it is of another type. Takes notices that come before it.
struct message answer(struct connection *connection, uint64_t id, enum tag tag);
// Both at once.
struct message exchange(struct connection *connection, enum tag tag, struct body *body,
                        enum tag reply);
// Reads notices until `*what` is no longer `before`.
void await_notice(struct connection *connection, const int *what, int before);
