/*
 * An open-loop client that nothing disturbs: it never sleeps, and has one request at most on a
 * connection. Python takes longer for a request than memcached does, and a client that sleeps
 * measures how it is woken.
 *
 *     open_loop PORT RATE SECONDS CONNECTIONS
 *
 * RATE 0 keeps one request after the other going on the first connection, sleeping until it is
 * answered. Prints requests answered a second, p50, p95 and p99 [us] from the sending on, and the
 * share of requests that were sent more than 100 us late, as all connections were busy.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { KEYS = 10000, MOST = 1024, LATE_NS = 100000 };

static double sent_ns[MOST];
static int sockets[MOST], idle[MOST];

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e9 * now.tv_sec + now.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int connected(int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1, made = socket(AF_INET, SOCK_STREAM, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (made < 0 || connect(made, (struct sockaddr *)&to, sizeof to)) die("connect");
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return made;
}

static void request(int which) {
    char text[64];
    int length = snprintf(text, sizeof text, "get %030ld\r\n", random() % KEYS);
    sent_ns[which] = now_ns();
    if (send(sockets[which], text, length, MSG_NOSIGNAL) != length) die("send");
}

/* Whether the answer is there; all of it comes at once. */
static int answered(int which) {
    char text[4096];
    ssize_t length = recv(sockets[which], text, sizeof text, 0);
    if (length < 0 && errno == EAGAIN) return 0;
    if (length < 5 || memcmp(text + length - 5, "END\r\n", 5)) die("recv");
    return 1;
}

static int rising(const void *one, const void *other) {
    double left = *(const double *)one, right = *(const double *)other;
    return (left > right) - (left < right);
}

int main(int count, char **given) {
    if (count != 5) return 2;
    int port = atoi(given[1]), connections = atoi(given[4]), idling = 0, watch = epoll_create1(0);
    double rate = atof(given[2]), seconds = atof(given[3]);
    size_t most = (rate > 0 ? rate : 2e5) * seconds * 1.2 + 1000, done = 0, late = 0, sent = 0;
    double *took_us = malloc(most * sizeof *took_us);
    if (!took_us || connections < 1 || connections > MOST) return 2;
    for (int i = 0; i < connections; i++) {
        struct epoll_event wanted = {.events = EPOLLIN, .data.u32 = i};
        sockets[i] = connected(port);
        if (rate > 0) fcntl(sockets[i], F_SETFL, O_NONBLOCK);
        epoll_ctl(watch, EPOLL_CTL_ADD, sockets[i], &wanted);
        idle[idling++] = i;
    }
    double begun_ns = now_ns(), end_ns = begun_ns + 1e9 * seconds, due_ns = begun_ns;
    while (now_ns() < end_ns && done < most) {
        if (rate == 0) {
            request(0);
            answered(0);
            took_us[done++] = (now_ns() - sent_ns[0]) / 1e3;
            continue;
        }
        if (idling && now_ns() >= due_ns) {
            request(idle[--idling]);
            late += sent_ns[idle[idling]] - due_ns > LATE_NS;
            sent++;
            due_ns += -log(1.0 - drand48()) * 1e9 / rate;
        }
        struct epoll_event ready[16];
        int found = epoll_wait(watch, ready, 16, 0);
        for (int i = 0; i < found; i++) {
            int which = ready[i].data.u32;
            if (!answered(which)) continue;
            took_us[done++] = (now_ns() - sent_ns[which]) / 1e3;
            idle[idling++] = which;
            if (done == most) break;
        }
    }
    double length_s = (now_ns() - begun_ns) / 1e9;
    qsort(took_us, done, sizeof *took_us, rising);
    if (!done) return 1;
    printf("%.1f %.2f %.2f %.2f %.5f\n", done / length_s, took_us[done / 2],
           took_us[(size_t)(done * 0.95)], took_us[(size_t)(done * 0.99)],
           sent ? (double)late / sent : 0.0);
    return 0;
}
