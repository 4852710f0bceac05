/* watch_net.c - questions and answers between watching threads over UDP. Floor: dist.
 *
 * MPI is not for these threads, and a datagram that is lost, or that nobody reads, costs nothing:
 * the next one is sent soon. Hosts may have addresses that others cannot reach, so a question goes
 * to all of them and says whom it is for; the answer goes back to where the question came from. */
#include "dist/watching.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct {
    uint64_t key; /* the job's */
    int32_t word, from, to;
    tr_testimony testimony; /* of an answer */
} packet;

static void list_addresses(tr_watch_door *door) {
    struct ifaddrs *all = NULL;
    int found = 0;
    if (getifaddrs(&all) != 0) all = NULL;
    for (struct ifaddrs *a = all; a && found < TR_WATCH_ADDRESSES; a = a->ifa_next) {
        if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET) continue;
        if (!(a->ifa_flags & IFF_UP) || (a->ifa_flags & IFF_LOOPBACK)) continue;
        struct sockaddr_in in;
        memcpy(&in, a->ifa_addr, sizeof in);
        door->address[found++] = in.sin_addr.s_addr;
    }
    if (found == 0) door->address[0] = htonl(INADDR_LOOPBACK); /* all ranks are on this machine */
    if (all) freeifaddrs(all);
}

int tr_watch_open(tr_watch_door *door) {
    *door = (tr_watch_door){0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t bytes = sizeof own;
    if (bind(fd, (struct sockaddr *)&own, sizeof own) != 0 ||
        getsockname(fd, (struct sockaddr *)&own, &bytes) != 0) {
        close(fd);
        return -1;
    }
    door->port = own.sin_port;
    list_addresses(door);
    return fd;
}

void tr_watch_tell(int socket, uint64_t key, tr_watch_word word, int from, int to,
                   const tr_watch_door *door) {
    packet p;
    memset(&p, 0, sizeof p);
    p.key = key;
    p.word = (int32_t)word;
    p.from = from;
    p.to = to;
    for (int i = 0; i < TR_WATCH_ADDRESSES && door->address[i]; i++) {
        struct sockaddr_in at = {
            .sin_family = AF_INET, .sin_port = door->port, .sin_addr.s_addr = door->address[i]};
        /* not sent: as if it were lost */
        (void)!sendto(socket, &p, sizeof p, 0, (struct sockaddr *)&at, sizeof at);
    }
}

static void answer(int socket, packet p, const tr_testimony *own, int count,
                   const struct sockaddr_in *to) {
    int rank = p.to;
    p.word = TR_WATCH_ANSWER;
    p.to = p.from;
    p.from = rank;
    for (int i = 0; i < count; i++) {
        p.testimony = own[i];
        (void)!sendto(socket, &p, sizeof p, 0, (const struct sockaddr *)to, sizeof *to);
    }
}

void tr_watch_serve(int socket, uint64_t key, int rank, const tr_testimony *own, int count,
                    void (*hear)(const tr_testimony *answer)) {
    packet p;
    struct sockaddr_in from;
    socklen_t bytes = sizeof from;
    ssize_t n;
    while ((n = recvfrom(socket, &p, sizeof p, 0, (struct sockaddr *)&from, &bytes)) >= 0) {
        bytes = sizeof from;
        if (n != (ssize_t)sizeof p || p.key != key || p.to != rank) continue;
        if (p.word == TR_WATCH_END) {
            hear(NULL);
        } else if (p.word == TR_WATCH_ASK) {
            answer(socket, p, own, count, &from);
        } else {
            tr_mark *mark = &p.testimony.witness.mark;
            mark->place[TR_PLACE_BYTES - 1] = mark->action[TR_ACTION_BYTES - 1] = 0;
            hear(&p.testimony);
        }
    }
}
