"""The OpenAPI document and the page /docs, generated from the declarations of routes, structs, errors and metrics."""
