/* Property: with protection on, kernels and copies work, and host code that reads or writes device
 * memory dies with a message that says so and where. Built without hooks. */
#include "tests/simt/check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

__global__ void add(int *a, int v) {
    a[threadIdx.x] += v;
}

static void kernels_and_copies() {
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    int *a = to_device(std::vector<int>(64, 5)), *b = device_array<int>(64);
    LAUNCH(add, 1, 64, 0, stream)(a, 2);
    LAUNCH(add, 1, 64, 0, stream)(a, 10);
    cudaMemcpyAsync(b, a, 256, cudaMemcpyDeviceToDevice, stream);
    cudaStreamSynchronize(stream);
    CHECK(to_host(b, 64)[63] == 17, "under protection");
    cudaStreamDestroy(stream);
    simt_free(a);
    simt_free(b);
}

/* What a child says on stderr before it dies of a fault; *died_p: that it did. */
static std::string last_words(void (*child)(volatile int *), volatile int *device, bool *died_p) {
    int ends[2], status = 0;
    std::string text;
    char part[512];
    if (pipe(ends)) return "no pipe";
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 2);
        child(device);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) text.append(part, (size_t)n);
    close(ends[0]);
    waitpid(pid, &status, 0);
    *died_p = (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) ||
              (WIFEXITED(status) && WEXITSTATUS(status) != 0); /* ASan exits */
    return text;
}

static void check_death(const char *verb, void (*child)(volatile int *), volatile int *device) {
    bool died = false;
    std::string text = last_words(child, device, &died);
    std::string want = std::string("host code ") + verb + " device memory at ";
    CHECK(died, "a host that %s device memory lives on", verb);
    CHECK(text.find(want) != std::string::npos, "said: %s", text.c_str());
    CHECK(text.find("byte 12 of an allocation of 256") != std::string::npos, "said: %s",
          text.c_str());
}

int main() {
    simt_set_protect(true);
    kernels_and_copies();
    int *a = to_device(std::vector<int>(64));
    check_death(
        "read", [](volatile int *p) { printf("%d\n", p[3]); }, a);
    check_death(
        "wrote", [](volatile int *p) { p[3] = 1; }, a);
    kernels_and_copies();
    simt_set_protect(false);
    CHECK(a[3] == 0, "without protection the host may look");
    simt_free(a);
    CHECK(simt_errors() == 0, "reports of correct work");
    return check_result("protection of device memory");
}
