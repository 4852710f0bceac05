/* barrier.cc - __syncthreads and its votes, and the report of a deadlock.
 * Floor: kernels.
 *
 * A barrier is complete when every thread that has not exited arrived: as on GPUs, exited threads
 * do not count. Threads that meet there from different lines are an error even where the hardware
 * would let them through. */
#include "kernels/simt/internal.h"

#include <map>

namespace simt {

bool barrier_complete() {
    return now.arrived && now.arrived == now.live;
}

void barrier_release() {
    int ones = 0;
    if (now.barrier_vote != SIMT_NO_VOTE)
        for (int i = 0; i < now.threads; i++)
            if (now.thread_at[i].state == AT_BARRIER) ones += now.thread_at[i].vote;
    int result = ones;
    if (now.barrier_vote == SIMT_VOTE_OR) result = ones > 0;
    if (now.barrier_vote == SIMT_VOTE_AND) result = ones == now.arrived;
    now.arrived = 0;
    now.epoch++;
    simt_count.barriers++;
    for (int i = 0; i < now.threads; i++) {
        thread &t = now.thread_at[i];
        if (t.state != AT_BARRIER) continue;
        t.vote = result;
        make_ready(t);
    }
}

void report_deadlock() {
    pause nobody;
    std::map<std::string, std::vector<int>> waiting;
    for (int i = 0; i < now.threads; i++) {
        const thread &t = now.thread_at[i];
        std::string at = "exited";
        if (t.state == AT_BARRIER) at = std::string("wait in __syncthreads at ") + t.site;
        if (t.state == AT_COLLECTIVE) {
            char mask[32];
            snprintf(mask, sizeof mask, " (mask %08x)", t.mask);
            at = std::string("wait in ") + op_name(t.op) + mask + " at " + t.site;
        }
        waiting[at].push_back(i);
    }
    std::string text;
    for (const auto &entry : waiting) {
        text += "\n    threads";
        for (size_t i = 0; i < entry.second.size() && i < 8; i++)
            text += " " + std::to_string(entry.second[i]);
        if (entry.second.size() > 8)
            text += " ... (" + std::to_string(entry.second.size()) + " in all)";
        text += ": " + entry.first;
    }
    report("deadlock", nullptr, nullptr, "no thread can go on:%s", text.c_str());
}

} // namespace simt

int simt_syncthreads(const char *site, simt_vote vote, int predicate) {
    using namespace simt;
    thread &t = self();
    t.site = site;
    t.vote = predicate;
    if (now.arrived && (!same_site(now.barrier_site, site) || now.barrier_vote != vote))
        report("divergent barrier", nullptr, nullptr,
               "thread %d is at the barrier of %s, others wait at %s", t.pub.id, site,
               now.barrier_site);
    now.barrier_site = site;
    now.barrier_vote = vote;
    now.arrived++;
    t.state = AT_BARRIER;
    if (barrier_complete()) barrier_release();
    wait_here();
    return t.vote;
}
