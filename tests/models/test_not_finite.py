"""NaN on one side of a comparison is a difference, and on both sides it is reported: never equal, never lost."""

import math
import warnings

import pytest
import torch
import ways
from torch import nn
from ways import B, E, N, Way, lower

import headwise as hw
from headwise.errors import ConfigError
from headwise.fields import bits
from headwise.models.difference import Difference, difference

NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("mine", "theirs", "worst", "uncompared"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0, 0),
        ([[3.0, 5.0]], [[3.0, 4.0]], 0.2, 0),
        ([[0.0, 0.0]], [[0.0, 0.0]], 0.0, 0),
        ([[1.0, 0.0]], [[0.0, 0.0]], INF, 0),
        ([[NAN, 2.0]], [[1.0, 2.0]], INF, 0),
        ([[1.0, 2.0]], [[NAN, 2.0]], INF, 0),
        ([[NAN, 0.0]], [[0.0, 0.0]], INF, 0),
        ([[INF, 2.0]], [[1.0, 2.0]], INF, 0),
        ([[1.0, 2.0]], [[1.0, -INF]], INF, 0),
        ([[NAN, 2.0], [3.0, 5.0]], [[NAN, 2.0], [3.0, 4.0]], 0.2, 1),
        ([[INF, 2.0], [3.0, 5.0]], [[NAN, 2.0], [3.0, 4.0]], 0.2, 1),
        ([[NAN, NAN]], [[NAN, INF]], NAN, 1),
    ],
)
def test_a_difference_is_of_the_numbers_that_are_finite_on_both_sides(mine, theirs, worst, uncompared):
    found = difference(torch.tensor(mine), torch.tensor(theirs))
    assert found == pytest.approx(Difference(worst, uncompared, len(mine)), nan_ok=True)
    assert bool(found.reason("one", "other", 0.1)) == (not worst <= 0.1)


def test_differences_join_to_the_largest_that_is_known():
    none, some, half = Difference(), Difference(NAN, 2, 2), Difference(0.5, 1, 3)
    assert none.joined(half) == half
    assert some.joined(half) == Difference(0.5, 3, 5)
    assert math.isnan(none.joined(some).worst)
    assert Difference(INF, 0, 1).joined(half).worst == INF


def test_bits_of_copies_are_equal():
    x = torch.tensor([NAN, 1.0, -INF], dtype=torch.bfloat16)
    assert torch.equal(bits(x), bits(x.clone()))
    assert not torch.equal(bits(x), bits(x.nan_to_num(0.0)))


class Plain(Way):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.of(x, q @ k.mT / 2, v)


class Cleaned(Way):
    """NaN in its weights becomes 0: another function than attention, which returns NaN there."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / 2).softmax(-1).nan_to_num(0.0) @ v)


class Hidden(Way):
    """0 · NaN of masked keys is NaN in it; `attend` skips them."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.of(x, (q @ k.mT / 2).masked_fill(~lower(N), -torch.inf), v)


def made(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind()).eval()


def given(*tokens):
    """An input with NaN in these tokens of the first entry."""
    x = torch.randn(B, N, E, generator=torch.Generator().manual_seed(1))
    x[0, list(tokens)] = NAN
    return x


SOME = "15 of 30 rows are NaN or infinite in both results, and were not compared"
ALL = "its result is NaN or infinite everywhere, so that it could not be compared with that of attention"
ONE_SIDE = "its result differs from that of attention: one of both is NaN, infinite or 0 where the other is not"


def test_recognise_says_which_rows_are_nan_on_both_sides():
    found = hw.models.recognise(made(Plain), given(2))
    assert found[0].remark == "30 of 60 rows are NaN or infinite in both results, and were not compared"  # of both
    assert found[0].error < 1e-5
    assert f"0: {found[0].remark}" in repr(found)
    assert hw.models.recognise(made(Plain), given())[0].remark == ""


@pytest.mark.parametrize(("kind", "at", "why"), [(Plain, "all", ALL), (Cleaned, 2, ONE_SIDE), (Hidden, 4, ONE_SIDE)])
def test_nan_everywhere_or_on_one_side_is_not_recognised(kind, at, why):
    x = given() * NAN if at == "all" else given(at)
    with pytest.raises(ConfigError, match=why):
        hw.models.recognise(made(kind), x)


@pytest.mark.thorough
def test_certify_tells_nan_on_both_sides_from_equal_results():
    (some,) = hw.models.certify(made(Plain), given(2))
    assert some.same
    assert some.remarks[-1] == "30 of 60 rows are NaN or infinite in both results, and were not compared"
    certificate = hw.models.certify(made(Plain), given() * NAN)
    assert not certificate.same
    assert certificate[0].reason == ALL
    assert math.isnan(certificate[0].difference)
    assert "NaN or infinite, so that it was not compared with attend(" in repr(certificate)
    for kind, token in ((Cleaned, 2), (Hidden, 4)):
        certificate = hw.models.certify(made(kind), given(token))
        assert not certificate.same
        assert ONE_SIDE in certificate[0].reason
        assert hw.models.certify(made(kind), given()).same


def test_attach_takes_no_pass_with_nan_for_a_proof_and_says_so():
    model = made(Plain)
    with hw.attach(model) as handle:
        with pytest.warns(UserWarning, match=f"attach\\(model\\): 0: {SOME}"):
            model(given(2))
        assert handle.attached == ("0",)
    with pytest.raises(ConfigError, match=ALL), hw.attach(model):
        model(given() * NAN)


def test_attach_certifies_after_a_pass_in_which_only_one_side_was_nan():
    model = made(lambda: nn.Sequential(Plain(), Hidden()))
    spoiled = [True]
    model[0][1].register_forward_pre_hook(lambda module, x: (x[0] + given(4) * spoiled[0],) if spoiled[0] else None)
    with hw.attach(model) as handle:
        with pytest.warns(UserWarning, match=ONE_SIDE):
            model(given())
        assert handle.attached == ("0.0",)
        spoiled[0] = False
        expected = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(given())
            assert handle.attached == ("0.0", "0.1")
            expected = model(given())
    torch.testing.assert_close(model(given()), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [(2,), tuple(range(N))])
def test_a_watched_module_with_nan_is_in_the_record_or_in_unwatched(tokens):
    for kind in (Plain, Cleaned, Hidden):
        model = made(kind)
        with hw.watch(model) as record, torch.no_grad():
            model(given())
            model(given(*tokens))
        assert record.latest.nonfinite.any() or "0" in record.unwatched
    x = given() * NAN
    model = made(Plain)
    with hw.watch(model) as record, torch.no_grad():
        model(x)
    assert record.latest.nonfinite[:, 0].tolist() == [float(B * N)] * 3
    assert record.unwatched["0"].startswith(ALL)


def test_a_row_of_nan_that_is_not_among_those_compared_is_found():
    """After the first whole comparison, a record compares some rows of a call only."""

    class Long(Way):
        def forward(self, x):
            q, k, v = self.heads(x)
            out = (q @ k.mT / 2).masked_fill(~lower(x.shape[1]), -torch.inf).softmax(-1) @ v
            return self.merge(out)

    model, x = made(Long), torch.randn(1, 101, E)
    with hw.watch(model) as record, torch.no_grad():
        model(x)
        x[0, 100] = NAN  # all rows of the code are NaN, by 0 · NaN, and the last of attend's
        model(x)
    assert "0" in record.unwatched


def test_key_heads_with_nan_are_counted_as_those_without():
    model = made(ways.GroupedKeys)
    assert hw.models.recognise(model, given())[0].num_kv_heads == 2
    with torch.no_grad():
        model[0].v_proj.bias[0] = NAN
    assert hw.models.recognise(model, given())[0].num_kv_heads == 2


def test_heads_whose_results_are_nan_are_not_taken_for_removable():
    class Resizable(Way):
        def forward(self, x):
            q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            return self.out_proj(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))

    model = made(Resizable)
    (site,) = hw.models.find_heads(model, given())
    assert site.anatomy.resizing(site).fixed == ""
    with torch.no_grad():
        model[0].out_proj.bias[:] = NAN
    (site,) = hw.models.find_heads(model, given())
    assert "NaN or infinite everywhere, so that it could not be compared" in site.anatomy.resizing(site).fixed


def test_a_first_forward_with_nan_on_one_side_does_not_end_the_run():
    model, found = made(Hidden), []
    with hw.watch(model, alarms=[hw.telemetry.NonFiniteAlarm(then=found.append)]) as record, torch.no_grad():
        model(given(4))
        assert record.layers == ()
        assert ONE_SIDE in record.unwatched["0"]
        model(given())
        assert record.layers == ("0",)
        assert record.unwatched == {}
    assert [(one.summary.step, one.heads) for one in found] == [(0, ())]
    assert record.ledger.steps == 2
