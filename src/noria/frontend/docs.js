// The form that tries POST /t2i: sends the text as it stands, shows the image, or the error's message.
const form = document.querySelector("#try");
const said = form.querySelector("output");
const image = document.querySelector("#drawn");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const started = performance.now();
  said.textContent = "drawing…";
  image.hidden = true;
  try {
    const response = await fetch("/t2i", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: form.elements.body.value,
    });
    if (!response.ok) {
      said.textContent = (await response.json()).error.message;
      return;
    }
    if (response.headers.get("content-type") === "application/json") {
      const { images } = await response.json();
      image.src = `data:image/${images[0].format};base64,${images[0].b64_json}`;
    } else {
      image.src = URL.createObjectURL(await response.blob());
    }
    image.hidden = false;
    const seconds = ((performance.now() - started) / 1000).toFixed(2);
    said.textContent = `${seconds} s, seed ${response.headers.get("x-noria-seed")}`;
  } catch (error) {
    said.textContent = `no answer: ${error.message}`;
  }
});
