/* A DEALER of libzmq with heartbeats: asks, is silent for many of them, asks often, looks whether
 * the connection stood.
 *
 *   heartbeat ENDPOINT REQUESTS
 *
 * Every request must come back as it was sent, in order. Exit status 0, or 1 with a reason.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

enum { INTERVAL_MS = 50, TIMEOUT_MS = 5000, SILENCE_MS = 6000, PATIENCE_MS = 30000 };

static void fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, zmq_strerror(zmq_errno()));
  exit(1);
}

static void set(void *socket, int option, int value) {
  if (zmq_setsockopt(socket, option, &value, sizeof value)) fail("zmq_setsockopt");
}

static void ask(void *dealer, int from, int to) {
  char text[32], back[32];
  for (int i = from; i < to; i++) {
    int length = snprintf(text, sizeof text, "request %d", i);
    if (zmq_send(dealer, text, length, 0) != length) fail("zmq_send");
  }
  for (int i = from; i < to; i++) {
    int length = snprintf(text, sizeof text, "request %d", i);
    if (zmq_recv(dealer, back, sizeof back, 0) != length || memcmp(text, back, length))
      fail(text);
  }
}

/* Whether the monitor tells of a lost connection within so many milliseconds. */
static int lost(void *monitor, long milliseconds) {
  zmq_pollitem_t item = {monitor, 0, ZMQ_POLLIN, 0};
  return zmq_poll(&item, 1, milliseconds) > 0;
}

int main(int count, char **arguments) {
  if (count != 3) return 2;
  void *context = zmq_ctx_new();
  void *dealer = zmq_socket(context, ZMQ_DEALER);
  void *monitor = zmq_socket(context, ZMQ_PAIR);
  set(dealer, ZMQ_LINGER, 0);
  set(dealer, ZMQ_HEARTBEAT_IVL, INTERVAL_MS);
  set(dealer, ZMQ_HEARTBEAT_TIMEOUT, TIMEOUT_MS);
  set(dealer, ZMQ_HEARTBEAT_TTL, PATIENCE_MS);
  set(dealer, ZMQ_RCVTIMEO, PATIENCE_MS);
  if (zmq_socket_monitor(dealer, "inproc://events", ZMQ_EVENT_DISCONNECTED)) fail("monitor");
  if (zmq_connect(monitor, "inproc://events")) fail("zmq_connect to the monitor");
  if (zmq_connect(dealer, arguments[1])) fail(arguments[1]);
  ask(dealer, 0, 1);
  if (lost(monitor, SILENCE_MS)) {
    fprintf(stderr, "the connection was lost while nothing was asked\n");
    return 1;
  }
  ask(dealer, 1, atoi(arguments[2]));
  if (lost(monitor, 0)) {
    fprintf(stderr, "the connection was lost while much was asked\n");
    return 1;
  }
  zmq_close(dealer);
  zmq_close(monitor);
  zmq_ctx_destroy(context);
  return 0;
}
