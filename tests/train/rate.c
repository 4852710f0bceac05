/* Property: the learning rate follows its written formula at every step. Floor: tests. */
#include "train/rate.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static tr_config base(tr_lr_schedule schedule) {
    tr_config c = {0};
    c.training.steps = 100;
    c.optimizer.learning_rate = 1;
    c.optimizer.min_learning_rate = 0.1;
    c.optimizer.warmup_steps = 10;
    c.optimizer.decay_steps = 20;
    c.optimizer.schedule = schedule;
    return c;
}

static void near(const tr_config *c, int64_t step, double want) {
    double got = tr_learning_rate(c, step);
    if (fabs(got - want) > 1e-12) fail_msg("step %d: %.15g, not %.15g", (int)step, got, want);
}

static void warmup_is_linear(void **state) {
    (void)state;
    for (int kind = TR_LR_COSINE; kind <= TR_LR_WSD; kind++) {
        tr_config c = base((tr_lr_schedule)kind);
        for (int64_t s = 1; s <= 10; s++) near(&c, s, (double)s / 10);
    }
}

static void each_kind_ends_as_documented(void **state) {
    (void)state;
    tr_config cosine = base(TR_LR_COSINE), linear = base(TR_LR_LINEAR);
    tr_config constant = base(TR_LR_CONSTANT), wsd = base(TR_LR_WSD);
    near(&cosine, 55, 0.55);
    near(&cosine, 100, 0.1);
    near(&cosine, 130, 0.1);
    near(&linear, 55, 0.55);
    near(&linear, 100, 0.1);
    near(&constant, 100, 1);
    near(&wsd, 80, 1);
    near(&wsd, 90, 0.55);
    near(&wsd, 100, 0.1);
    wsd.optimizer.decay_steps = 0;
    near(&wsd, 100, 1);
}

static void no_warmup_starts_at_the_peak(void **state) {
    (void)state;
    tr_config c = base(TR_LR_LINEAR);
    c.optimizer.warmup_steps = 0;
    near(&c, 1, 1 - 0.9 / 100);
    c.training.steps = 1;
    near(&c, 1, 0.1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(warmup_is_linear),
                                       cmocka_unit_test(each_kind_ends_as_documented),
                                       cmocka_unit_test(no_warmup_starts_at_the_peak)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
