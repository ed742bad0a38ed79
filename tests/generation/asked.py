"""What tests of `generate` ask of models: prompts, sources, options, and a tokenizer."""

import numpy as np

from keras_tx.generation import Beam

PROMPTS = [[5, 7, 11, 3, 17], [9], [2, 2, 13]]
SOURCES = [[4, 3, 21], [8, 30, 6, 1, 36], [12]]
PADDED = np.array([[4, 3, 21, 0, 0], [8, 30, 6, 1, 36], [12, 0, 0, 0, 0]], "int32")
NEW, START = 6, 1
BEAM = Beam(4, num_return_sequences=3, length_penalty=0.0)
FAST = {"max_new_tokens": NEW, "forbidden_tokens": [0], "jit_compile": False}
WRITE = {**FAST, "start_token": START}
SHORT, SHORT_WRITE = ({**options, "max_new_tokens": 2} for options in (FAST, WRITE))


class Letters:
    """A tokenizer of letters: "a" is 3."""

    cls_id, sep_id, pad_id = 1, 2, 0

    def tokenize(self, texts):
        return [[ord(letter) - 94 for letter in text] for text in texts]

    def __call__(self, texts):
        rows = [[self.cls_id, *row, self.sep_id] for row in self.tokenize(texts)]
        return {"token_ids": np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], "int32")}

    def decode(self, rows):
        return ["".join(chr(token + 94) for token in row if token > 2) for row in rows]
