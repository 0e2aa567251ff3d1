"""Servings: Hugging Face repositories with ONNX models, from text to results.

    serving = transmuter.serving.text_embedding("org/repo")
    serving("The cat sat on the mat.")["embedding"]

A serving turns its input into what the model takes, puts several inputs into one batch, and turns the model's outputs
into results, as the pipelines of Python transformers do.
"""

# All of them at once: a module that is imported later would hide the function of its name.
from transmuter.serving.chat_template import ChatTemplate
from transmuter.serving.entity_recognition import zero_shot_entity_recognition
from transmuter.serving.fill_mask import fill_mask
from transmuter.serving.question_answering import question_answering
from transmuter.serving.repository import Repository
from transmuter.serving.runtime import Serving
from transmuter.serving.text_classification import text_classification
from transmuter.serving.text_embedding import text_embedding
from transmuter.serving.text_ranking import text_ranking
from transmuter.serving.token_classification import token_classification
from transmuter.serving.tokenizer import Encoding, Tokenizer
from transmuter.serving.zero_shot_classification import zero_shot_classification

TASKS = (
    "fill_mask",
    "question_answering",
    "text_classification",
    "text_embedding",
    "text_ranking",
    "token_classification",
    "zero_shot_classification",
    "zero_shot_entity_recognition",
)
"""The task functions: each takes a repository and returns a `Serving`."""

__all__ = [
    "TASKS",
    "ChatTemplate",
    "Encoding",
    "Repository",
    "Serving",
    "Tokenizer",
    "fill_mask",
    "question_answering",
    "text_classification",
    "text_embedding",
    "text_ranking",
    "token_classification",
    "zero_shot_classification",
    "zero_shot_entity_recognition",
]
