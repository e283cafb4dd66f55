"""`kvtier chat`: a person, or a script through a pipe, talks to a server of OpenAI's API."""
