"""The barriers of the product on Hopper in all interleavings, by a model that is written after its source.

The emulated machine of test_cuda_fused.py runs the source itself by a few schedules; here an exhaustive search goes
through all of them, for few stages, steps and tiles. What the model has of the kernel, and what not (the order in
which memory sees what is written, descriptors and addresses, registers), is said in cuda_pipeline_model.cpp.
"""

import re
from ctypes import Structure, c_bool, c_char_p, c_int, c_int64

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from .cuda_support import SOURCES, emulated


class Explored(Structure):
    _fields_ = (("states", c_int64), ("violation", c_char_p), ("run", c_char_p))


def library():
    return emulated("cuda_pipeline_model")


def constant(name):
    """Of the kernel: the header that the model includes has it."""
    return c_int.in_dll(library(), name).value


def explore(name, *arguments):
    """Number of states, and the first violation with the actions that lead to it."""
    function = getattr(library(), name)
    function.restype = Explored
    found = function(*arguments)
    return found.states, (found.violation or b"").decode(), found.run.decode()


def pipeline(stages, steps, tiles, warps, *, every_event=False, defect="none"):
    return explore("explore_pipeline", stages, steps, tiles, warps, c_bool(every_event), defect.encode())


def staging(tiles, defect="none"):
    pieces = tiles * constant("kernel_pieces")
    return explore("explore_staging", constant("kernel_places"), pieces, 4, defect.encode())


def check(explored, at_least):
    states, violation, run = explored
    print(f"{states} states")
    assert not violation, f"{violation}, after\n{run}"
    assert states > at_least


@pytest.mark.parametrize(
    ("stages", "steps", "tiles", "warps", "at_least"),
    [
        (2, 3, 1, 2, 500),  # one consumer has nothing to do
        (2, 2, 3, 2, 10_000),  # as many steps as stages
        pytest.param(2, 1, 4, 2, 50_000, marks=pytest.mark.long),  # a tile's first step is its last
        pytest.param(2, 3, 5, 2, 40_000, marks=pytest.mark.long),  # stages change places from tile to tile
        pytest.param(3, 2, 4, 1, 3_000, marks=pytest.mark.long),  # stages for the next tile while one is multiplied
        pytest.param(3, 4, 3, 2, 200_000, marks=pytest.mark.long),
    ],
)
def test_every_interleaving_ends_well(stages, steps, tiles, warps, at_least):
    """Each warp waits and arrives by itself: two stand for the four of a consumer."""
    check(pipeline(stages, steps, tiles, warps), at_least)


@pytest.mark.long
def test_as_many_stages_as_the_kernel_has():
    stages = constant("kernel_stages")
    check(pipeline(stages, stages + 1, 3, 1), 100_000)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (2, 1, 3, 1), (2, 3, 2, 1)], ids=str)
def test_events_that_the_model_leaves_out_change_nothing(sizes):
    """Copies that land in any order, and products that end before anybody waits for them."""
    check(pipeline(*sizes, every_event=True), 20_000)


PIPELINE_DEFECTS = {
    "producer_waits_for_other_phase": "deadlock",
    "consumers_wait_for_other_phase": "products read what is not of their round",
    "too_few_expected_at_empty": "two copies go to the same place|a barrier gets more arrivals than it expects",
    "too_many_expected_at_empty": "deadlock",
    "arrives_before_it_expects": "products read what is not of their round",
    "expects_own_bytes_only": "products read what is not of their round",
    "no_wait_for_products": "a copy overwrites what products read",
    "releases_its_own_round": "a copy overwrites what products read",
    "releases_in_its_own_block_only": "deadlock",
    "no_last_wait_for_products": "an epilogue reads sums that products still change",
    "forgets_the_last_release": "deadlock",
    "no_turn": "products read what is not of their round",
    "waits_for_a_first_turn": "deadlock",
    "passes_the_last_turn": "arrivals are left at a turn",
    "no_start_barrier": "a block is reached before its barriers are initialised",
    "no_exit_barrier": "a block is reached after its exit",
}


@pytest.mark.parametrize("every_event", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("defect", PIPELINE_DEFECTS)
def test_a_defect_is_found(defect, every_event):
    _, violation, run = pipeline(2, 2, 3, 1, every_event=every_event, defect=defect)
    assert re.fullmatch(PIPELINE_DEFECTS[defect], violation), run
    assert "block 0" in run


@pytest.mark.parametrize("every_event", [False, True])
def test_a_barrier_may_expect_bytes_that_have_come(every_event):
    """Another block's part may come first. The model takes no harmless order for a defect."""
    check(pipeline(2, 2, 2, 1, every_event=every_event, defect="expects_after_the_copies"), 500)


@pytest.mark.parametrize(("tiles", "at_least"), [(1, 400), (3, 1_200)])
def test_pieces_wait_for_stores_and_stores_for_pieces(tiles, at_least):
    check(staging(tiles), at_least)


STAGING_DEFECTS = {
    "no_wait_for_stores": "a warp overwrites what a store reads",
    "waits_for_one_store_less": "a warp overwrites what a store reads",
    "no_barrier_before_writing": "a warp overwrites what a store reads",
    "no_barrier_before_store": "a store reads what a warp has not written",
    "no_empty_group": "a warp overwrites what a store reads",
    "no_wait_at_the_end": "a store reads after the consumer's end",
}


@pytest.mark.parametrize("defect", STAGING_DEFECTS)
def test_a_defect_of_the_staging_is_found(defect):
    _, violation, run = staging(2, defect)
    assert violation == STAGING_DEFECTS[defect], run


CALLS = r"\b(barrier_|barriers_|numbered_|products_(?!begin)|stores_|store_|load_|cluster_(?!rank)|release\()"
MODELLED = """
barrier_wait(shared.empty(stage), (round / STAGES & 1) ^ 1)
barrier_expect(shared.full(stage), STEP_BYTES)
load_box(hidden, shared.hidden(stage), shared.full(stage), step * TILE_DEPTH, tile.row)
load_box_for( (1 << CLUSTER) - 1, weight, shared.weight(stage) + part * (WEIGHT_BYTES / CLUSTER), shared.full(stage), \
step * TILE_DEPTH, tile.column + part * WEIGHT_ROWS)
if (lane < CLUSTER) barrier_arrive(shared.empty(round % STAGES), lane)
barrier_wait(shared.full(stage), round / STAGES & 1)
products_commit()
products_wait<1>()
if (step > 0) release(shared, round - 1)
if (threadIdx.x % WARPGROUP == 0) stores_read<PLACES - 1>()
numbered_sync(barrier, WARPGROUP)
numbered_sync(barrier, WARPGROUP)
if (column < vocabulary) store_box(out, base + number % PLACES * PIECE_BYTES, column, row)
else store_nothing()
if (number > 0) numbered_sync(TURN + consumer, 2 * WARPGROUP)
numbered_arrive(TURN + (consumer + 1) % CONSUMERS, 2 * WARPGROUP)
products_wait<0>()
release(shared, round + steps - 1)
if (WRITES && threadIdx.x % WARPGROUP == 0) stores_read<0>()
barrier_init(shared.full(stage), 1)
barrier_init(shared.empty(stage), CLUSTER * WARPGROUP / WARP)
barriers_visible()
cluster_arrive()
cluster_wait()
cluster_arrive()
cluster_wait()
"""


def test_the_model_is_of_this_kernel():
    """Where a statement about the pipeline differs, cuda_pipeline_model.cpp says what follows it in the model."""
    if not SOURCES.is_dir():
        pytest.skip(f"it takes the sources in {SOURCES}")
    code = re.sub(r"//.*", "", (SOURCES / "product_kernel.cuh").read_text())
    statements = [" ".join(statement.split()) for statement in re.split(r"[;{}]", code)]
    found = [each for each in statements if re.search(CALLS, each) and "__device__" not in each]
    assert found == MODELLED.strip().splitlines()
