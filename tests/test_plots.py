"""Pictures: what is drawn is what was given, and nothing of matplotlib's global state changes."""

import io
from types import SimpleNamespace

import keras
import matplotlib.pyplot
import numpy as np
import pytest

from keras_tx import plots
from keras_tx.plots import attention_map, confusion_matrix, training_curves

HISTORY = {
    "loss": [0.9, 0.5, 0.4],
    "accuracy": [0.5, 0.7, 0.8],
    "val_loss": [1.0, 0.6, 0.7],
    "val_accuracy": [0.4, 0.6, 0.5],
}
TOKENS = ["a", "b", "c", "d", "e"]


def scores(*shape):
    raw = np.exp(np.random.default_rng(0).normal(size=shape))
    return raw / raw.sum(axis=-1, keepdims=True)


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_curves_show_train_validation_and_the_best_epoch_of_validation():
    loss, accuracy = training_curves(HISTORY).axes
    assert [line.get_ydata().tolist() for line in loss.lines[:2]] == [HISTORY["loss"], HISTORY["val_loss"]]
    assert loss.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert legend(loss) == ["train", "validation", "best: 0.6 in epoch 2"]
    assert legend(accuracy) == ["train", "validation", "best: 0.6 in epoch 2"]
    assert (loss.get_xlabel(), loss.get_ylabel(), accuracy.get_ylabel()) == ("epoch", "loss", "accuracy")


def test_a_learning_rate_has_no_best_epoch():
    _, rate = training_curves({"loss": [2.0, 1.0], "learning_rate": [0.1, 0.2]}).axes
    assert legend(rate) == ["train"]


def test_what_is_not_finite_is_never_the_best():
    (axes,) = training_curves({"accuracy": [0.5, float("nan"), float("inf"), 0.6]}).axes
    assert legend(axes)[-1] == "best: 0.6 in epoch 4"


def test_history_its_dict_and_its_csv_file_give_the_same_curves(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((8, 2)), np.ones((8, 1))
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = model.fit(x, y, validation_data=(x, y), validation_freq=2, epochs=4, verbose=0, callbacks=[logger])
    for given in (history, history.history, tmp_path / "log.csv"):
        (axes,) = training_curves(given, validation_freq=2).axes
        train, validation = (line.get_xydata() for line in axes.lines[:2])
        np.testing.assert_allclose(train, np.c_[1:5, history.history["loss"]], rtol=1e-6)
        validation = validation[np.isfinite(validation[:, 1])]
        np.testing.assert_allclose(validation, np.c_[[2, 4], history.history["val_loss"]], rtol=1e-6)


def test_a_resumed_history_keeps_its_epochs():
    (axes,) = training_curves(SimpleNamespace(epoch=[5, 6], history={"loss": [0.3, 0.2]})).axes
    assert axes.lines[0].get_xdata().tolist() == [6, 7]


@pytest.mark.parametrize(
    ("first", "last", "every", "validated"),
    [(0, 4, 2, [2, 4]), (5, 8, 2, [6, 8]), (5, 9, 2, [6, 8]), (0, 10, [1, 2, 10], [1, 2, 10]), (0, 7, (3, 5), [3, 5])],
)
def test_values_of_validation_belong_to_the_epochs_that_its_frequency_chooses(tmp_path, first, last, every, validated):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((2, 1))
    freq = every if isinstance(every, int) else list(every)
    options = {"initial_epoch": first, "epochs": last, "validation_freq": freq, "validation_data": (x, x)}
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = model.fit(x, x, verbose=0, callbacks=[logger], **options)
    found = training_curves(history, validation_freq=every).axes[0].lines[1].get_xydata()
    logged = training_curves(tmp_path / "log.csv").axes[0].lines[1].get_xydata()
    assert found[:, 0].tolist() == validated
    np.testing.assert_allclose(found, logged[np.isfinite(logged[:, 1])], rtol=1e-6)
    message = (
        f"must be one for each epoch, .*: {len(validated)} of val_loss in {last - first} .*, validation_freq=1. Pass"
    )
    with pytest.raises(ValueError, match=message):
        training_curves(history)


def test_numbers_may_be_tensors():
    (axes,) = training_curves({"loss": [keras.ops.convert_to_tensor(2.0), 1.0]}).axes
    assert axes.lines[0].get_ydata().tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("history", "error", "message"),
    [
        ({}, ValueError, r"at least one epoch of one metric. Received: \{\}"),
        ({"loss": []}, ValueError, r"at least one epoch of one metric. Received: \{'loss': \[\]\}"),
        ({"loss": ["high"]}, ValueError, r"must hold numbers. Received: .*'high'"),
        ({"loss": [1, 2, 3], "val_loss": [1]}, ValueError, r"Received: 1 of val_loss in 3 epochs"),
        ([0.5], TypeError, r"must be a History, its dict or the path of a CSV file. Received: \[0.5\]"),
        ("nowhere.csv", FileNotFoundError, r"must be a file that exists. Received: history='nowhere.csv'"),
    ],
)
def test_a_wrong_history_is_refused(history, error, message):
    with pytest.raises(error, match=message):
        training_curves(history)


@pytest.mark.parametrize("validation_freq", [0, [2, "3"]])
def test_a_wrong_validation_freq_is_refused(validation_freq):
    with pytest.raises(ValueError, match="`validation_freq` must be a positive integer. Received: validation_freq="):
        training_curves({"loss": [1, 2, 3], "val_loss": [1]}, validation_freq=validation_freq)


def test_values_of_training_do_not_follow_validation_freq():
    with pytest.raises(ValueError, match="Received: 1 of loss in 3 epochs, validation_freq=2"):
        training_curves({"loss": [1], "val_loss": [1, 2, 3]}, validation_freq=2)


@pytest.mark.parametrize("separator", [",", ";", "\t", " ", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_may_have_another_separator_and_a_byte_order_mark(tmp_path, separator, encoding):
    rows = [["epoch", "loss", "val_loss"], ["2", "0.5", "NA"], ["3", "0.25", "0.75"]]
    (tmp_path / "log.csv").write_text("".join(separator.join(row) + "\r\n" for row in rows), encoding=encoding)
    (axes,) = training_curves(tmp_path / "log.csv").axes
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[3, 0.5], [4, 0.25]])
    np.testing.assert_array_equal(axes.lines[1].get_xydata(), [[3, np.nan], [4, 0.75]])


def test_a_file_whose_first_column_is_no_epoch(tmp_path):
    (tmp_path / "log.csv").write_text("epoch_loss,accuracy\n3,0.5\n2,0.75\n")
    assert [axes.get_ylabel() for axes in training_curves(tmp_path / "log.csv").axes] == ["epoch loss", "accuracy"]


@pytest.mark.parametrize(("rows", "line"), [("0,1,3\n1,2\n", 2), ("0,1\n1,2,3\n", 3)])
def test_a_row_with_more_values_than_names_is_refused(tmp_path, rows, line):
    (tmp_path / "log.csv").write_text("epoch,loss\n" + rows)
    message = rf"more values than the header has names. Received: line {line} of .*log.csv' with 3 values, .*'loss'\]"
    with pytest.raises(ValueError, match=message):
        training_curves(tmp_path / "log.csv")


def test_a_file_with_a_header_alone_is_refused(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,loss\n")
    with pytest.raises(ValueError, match="at least one epoch of one metric"):
        training_curves(tmp_path / "log.csv")


def test_a_map_has_a_panel_for_each_head_with_its_scores():
    given = scores(3, 5, 5)
    *panels, bar = attention_map(given, TOKENS, title="$5").axes
    for head, axes in enumerate(panels):
        np.testing.assert_allclose(axes.images[0].get_array(), given[head], rtol=1e-6)
        assert axes.get_title() == f"head {head}"
        assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
        assert axes.images[0].get_clim() == (0, np.float32(given.max()))
    assert [label.get_text() for label in panels[0].get_yticklabels()] == TOKENS
    assert bar.get_ylabel() == "attention score"


def test_a_stack_has_a_row_for_each_layer_or_what_is_chosen_of_it():
    given = scores(2, 3, 5, 5)
    titles = lambda **chosen: [axes.get_title() for axes in attention_map(given, TOKENS, **chosen).axes[:-1]]
    assert titles() == [f"layer {layer}, head {head}" for layer in range(2) for head in range(3)]
    assert titles(layer=1) == ["layer 1, head 0", "layer 1, head 1", "layer 1, head 2"]
    assert titles(layer=1, head=2) == ["layer 1, head 2"]
    assert titles(head="mean") == ["layer 0, mean of heads", "layer 1, mean of heads"]
    chosen = attention_map(given, TOKENS, layer=1, head=2).axes[0].images[0].get_array()
    np.testing.assert_allclose(chosen, given[1, 2], rtol=1e-6)
    mean = attention_map(given, TOKENS, layer=0, head="mean").axes[0].images[0].get_array()
    np.testing.assert_allclose(mean, given[0].mean(axis=0), rtol=1e-6)


def test_keys_of_cross_attention_have_their_own_tokens():
    axes = attention_map(scores(1, 2, 5), ["x", "y"], key_tokens=TOKENS).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "y"]


ANY_SIGN = ["電影", "$x$", "\n\t", b"\xc3\xa9".decode(), "🙂", b"\xe9", "", "##s", "\u200d", "क\u200dष", "\ufe0f"]
SHOWN = ["電影", "$x$", r"\n\t", "é", "🙂", "\N{REPLACEMENT CHARACTER}", "", "##s", r"\u200d", "क\u200dष", r"\ufe0f"]


@pytest.fixture
def only_bundled(monkeypatch):
    """As if no font were installed besides those that matplotlib brings."""
    bundled = str(matplotlib.get_data_path())
    found = {name: path for name, path in plots._installed().items() if path.startswith(bundled)}
    monkeypatch.setattr(plots, "_installed", lambda: found)
    return found


def test_any_sign_can_stand_in_a_token(tmp_path, only_bundled):
    with pytest.warns(UserWarning) as caught:
        axes = attention_map(scores(1, 11, 11), ANY_SIGN, tmp_path / "map.png", title="電影 $\n\ud800").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == SHOWN
    (warning,) = caught  # one, however often matplotlib draws
    assert warning.filename == __file__ and "U+200D" not in str(warning.message)
    for sign in ("क (U+0915)", "電 (U+96FB)", "🙂 (U+1F642)"):
        assert sign in str(warning.message)


def test_a_warning_names_at_most_ten_characters(only_bundled):
    with pytest.warns(UserWarning, match=r"as boxes: 一 \(U\+4E00\), .*三 \(U\+4E09\) and 2 more\. Install"):
        training_curves({"".join(map(chr, range(0x4E00, 0x4E0C))): [1.0]})


def test_a_font_that_is_installed_draws_what_the_first_one_lacks(only_bundled):
    """STIX, which matplotlib brings, stands for a font of another script; without it, matplotlib would warn."""
    ours, theirs = (plots._characters_of(plots.fonts.findfont(name)) for name in ("DejaVu Sans", "STIXGeneral"))
    sign = sorted(theirs - ours)[7]
    figure = attention_map(scores(1, 2, 2), ["a", sign])
    label = figure.axes[0].get_xticklabels()[1]
    assert label.get_fontfamily() == ["DejaVu Sans", "STIXGeneral"]
    figure.savefig(io.BytesIO())  # every warning is an error here
    label.set_fontfamily(["DejaVu Sans"])
    with pytest.warns(UserWarning, match="Glyph .* missing"):
        figure.savefig(io.BytesIO())


def test_a_font_of_another_script_comes_before_the_others_and_only_where_it_is_needed(monkeypatch):
    characters = {"/cjk": frozenset("電影"), "/any": frozenset("電影क"), "/formula": frozenset("電影क")}
    real, dejavu = plots._characters_of, plots.fonts.findfont("DejaVu Sans")
    monkeypatch.setattr(plots, "_characters_of", lambda path: characters.get(path) or real(path))
    entries = [SimpleNamespace(name="A font", fname="/any", style="normal", weight=400)]
    entries += [SimpleNamespace(name="Noto Sans CJK SC", fname="/cjk", style="normal", weight=400)]
    entries += [SimpleNamespace(name="Noto Sans CJK SC", fname="/bold", style="normal", weight=700)]
    entries += [SimpleNamespace(name="cmex10", fname="/formula", style="normal", weight=400)]
    entries += [SimpleNamespace(name="Last Resort High-Efficiency", fname="/formula", style="normal", weight=400)]
    monkeypatch.setattr(plots.fonts.fontManager, "ttflist", entries)
    monkeypatch.setattr(plots.fonts.fontManager, "findfont", lambda name: dejavu)
    assert plots._characters_of("/removed") == frozenset()
    assert plots._font_families(["film"]) == ["DejaVu Sans"]
    assert plots._font_families(["電影"]) == ["DejaVu Sans", "Noto Sans CJK SC"]
    assert plots._font_families(["電影", "क"]) == ["DejaVu Sans", "Noto Sans CJK SC", "A font"]


def test_scores_that_are_all_zero_are_drawn():
    assert attention_map(np.zeros((1, 2, 2)), ["a", "b"]).axes[0].images[0].get_clim() == (0, 1)


@pytest.mark.parametrize(
    "draw", [lambda path: training_curves(HISTORY, path), lambda path: attention_map(scores(2, 5, 5), TOKENS, path)]
)
def test_the_picture_is_a_png_in_a_folder_made_for_it(tmp_path, draw):
    path = tmp_path / "new" / "picture"
    draw(path)
    draw(path)  # over what is there
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [file.name for file in path.parent.iterdir()] == ["picture"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scores": scores(5, 5)}, ValueError, r"`scores` must be .* Received: shape \(5, 5\)"),
        ({"scores": scores(3, 0, 0)}, ValueError, r"`scores` must be .* Received: shape \(3, 0, 0\)"),
        ({"scores": scores(3, 5, 5) * np.nan}, ValueError, r"`scores` must be finite and not negative. Received: nan"),
        ({"scores": scores(3, 5, 5) - 1}, ValueError, r"`scores` must be finite and not negative. Received: -0.9"),
        ({"tokens": TOKENS[:4]}, ValueError, r"`tokens` must have .* each of the 5 .* Received: 4 strings, .*\(5, 5\)"),
        ({"key_tokens": []}, ValueError, r"`key_tokens` must have .* of the 5 .* Received: 0 strings"),
        ({"tokens": "abcde"}, TypeError, r"`tokens` must be a list of strings. Received: tokens='abcde'"),
        ({"key_tokens": [1] * 5}, TypeError, r"`key_tokens` must be a list of strings. Received: key_tokens=\[1"),
        ({"title": 7}, TypeError, r"`title` must be a string or None. Received: title=7"),
        ({"layer": 0}, ValueError, r"`layer` must be None for the scores of one layer. Received: layer=0"),
        ({"scores": scores(2, 3, 5, 5), "layer": 2}, ValueError, r"`layer` must be one of \[0, 1\]. Received: layer=2"),
        ({"head": 3}, ValueError, r"`head` must be one of \[0, 1, 2\]. Received: head=3"),
        ({"head": "max"}, ValueError, r"`head` must be one of \[0, 1, 2, 'mean'\]. Received: head='max'"),
        ({"head": np.array([0, 1])}, ValueError, r"`head` must be an integer. Received: head=array\(\[0, 1\]\)"),
        ({"head": True}, ValueError, r"`head` must be an integer. Received: head=True"),
        ({"scores": scores(2, 3, 5, 5), "layer": 1.0}, ValueError, r"`layer` must be an integer. Received: layer=1.0"),
    ],
)
def test_a_wrong_map_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        attention_map(**{"scores": scores(3, 5, 5), "tokens": TOKENS, **arguments})


def test_a_confusion_matrix_counts_what_each_label_was_taken_for(tmp_path):
    labels, predictions = [0, 0, 0, 2, 2], [0, 1, 1, 2, 0]
    pairs = list(zip(labels, predictions, strict=True))
    axes = confusion_matrix(labels, predictions, ["a", "b", "$c"], tmp_path / "new" / "matrix.png", title="$5").axes[0]
    assert [int(text.get_text()) for text in axes.texts] == [pairs.count(cell) for cell in np.ndindex(3, 3)]
    np.testing.assert_allclose(axes.images[0].get_array(), [[1 / 3, 2 / 3, 0], [0, 0, 0], [0.5, 0, 0.5]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "$c"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("prediction", "label")
    assert (tmp_path / "new" / "matrix.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"labels": [0, 2]}, ValueError, r"`labels` must be .* in \[0, 2\).* Received: labels=\[0, 2\]"),
        ({"labels": []}, ValueError, r"`labels` must be .* Received: labels=\[\]"),
        ({"predictions": [0.5, 1.0]}, ValueError, r"`predictions` must be .* Received: predictions=\[0.5, 1.0\]"),
        ({"predictions": [1]}, ValueError, r"as many as `labels`. Received: 1 predictions, 2 labels"),
        ({"title": ["a"]}, TypeError, r"`title` must be a string or None. Received: title=\['a'\]"),
        ({"names": "ab"}, TypeError, r"`names` must be a list of strings. Received: names='ab'"),
    ],
)
def test_a_wrong_confusion_matrix_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        confusion_matrix(**{"labels": [0, 1], "predictions": [0, 1], "names": ["a", "b"], **arguments})


def test_the_global_state_of_matplotlib_stays_as_it_was(tmp_path):
    before = matplotlib.get_backend(auto_select=False), matplotlib.pyplot.get_fignums(), matplotlib.rcParams.copy()
    training_curves(HISTORY, tmp_path / "curves.png")
    attention_map(scores(2, 5, 5), TOKENS, tmp_path / "map.png")
    after = matplotlib.get_backend(auto_select=False), matplotlib.pyplot.get_fignums(), matplotlib.rcParams.copy()
    assert after == before


@pytest.mark.parametrize("name", ["", ".", "folder"])
def test_a_path_that_is_no_file_name_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=f"`path` must be the name of a file, .*Received: path='{name}'"):
        training_curves(HISTORY, name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_the_picture_can_be_read_by_whom_the_umask_allows(tmp_path):
    training_curves(HISTORY, tmp_path / "curves.png")
    (tmp_path / "other").touch()
    assert (tmp_path / "curves.png").stat().st_mode == (tmp_path / "other").stat().st_mode
