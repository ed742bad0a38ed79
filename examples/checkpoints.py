"""Opens a checkpoint for finetune_bert.py and bert_features.py."""

from keras_tx import pretrained, text

SHORTEST = 3  # tokens: one of the text, between the first and the last, which are special


def check_max_length(parser, arguments):
    """Ends the program if no token of a text would be left."""
    if arguments.max_length < SHORTEST:
        parser.error(f"--max-length must be at least {SHORTEST}. Received: {arguments.max_length}")


def load(parser, checkpoint, max_length, **options):
    """Returns the model of a checkpoint, and its tokenizer, which cuts texts where the positions of the model end.

    Ends the program if the checkpoint cannot be read.
    """
    try:
        model = pretrained.from_pretrained(checkpoint, **options)
        positions = model.get_layer("embedding").positions  # None if it is the attention that knows them
        longest = min(max_length, positions.max_length if positions is not None else max_length)
        tokenizer = text.load_tokenizer(model.source, max_length=longest)
    except (ValueError, OSError, ImportError) as error:
        parser.error(f"--checkpoint {checkpoint} cannot be loaded: {' '.join(str(error).split())}")
    if longest < max_length:
        print(f"the checkpoint has {longest} positions: longer texts are cut there")
    return model, tokenizer
