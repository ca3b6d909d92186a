"""Searches captions by meaning, and has the best one drawn: an endpoint with code of one's own (docs/user-code.md).

noria serve bundled --additional-models minilm --config examples/user_code/noria.toml
curl -s http://localhost:8000/v1/endpoints/captions -H 'content-type: application/json' \\
  -d '{"query": "something round that glows", "draw": true}'
"""

import numpy as np

from noria.user_code import InvalidInput


class NearestCaption:
    # name of a variable and its edges: noria_stat_similarity in Prometheus, docs/statistics.md
    statistics = {"similarity": (0.2, 0.4, 0.6, 0.8, 1.0)}  # noqa: RUF012 - nobody changes it

    def load(self, ctx):
        """Called once in each front end, and again when this file has changed."""
        self.captions = (ctx.folder / ctx.settings["captions"]).read_text(encoding="utf-8").splitlines()
        self.image_model = ctx.settings["image_model"]
        self.vectors = None  # vectors of the captions; models cannot be called before the server is ready

    def preprocess(self, body, state):
        """Return the texts to encode."""
        query = body.get("query")
        if not isinstance(query, str) or not query:
            raise InvalidInput(f"query is {query!r}; it must be a text.", field="query")
        state.draw = body.get("draw") is True
        return query

    async def postprocess(self, result, state):
        """Return the response; `result.rows` has the query's embedding."""
        if self.vectors is None:
            self.vectors = (await state.call(result.spec.name, {"inputs": self.captions})).rows
        similarities = self.vectors @ result.rows[0]
        best = np.argsort(-similarities)[:3]
        state.record("similarity", similarities[best[0]])
        found = [{"caption": self.captions[index], "similarity": similarities[index]} for index in best]
        if not state.draw:
            return {"found": found}
        image = await state.call(self.image_model, {"prompt": found[0]["caption"], "seed": 7})
        return {"found": found, "image": image["images"][0]["b64_json"]}
