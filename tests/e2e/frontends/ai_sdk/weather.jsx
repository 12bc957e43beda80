// A page whose tool runs in it: `useWeather` is of docs/ai-sdk.md.
import { createRoot } from "react-dom/client";
import { useWeather } from "./useWeather.jsx";

const query = new URLSearchParams(location.search);
const id = query.get("chat");
const body = { model: query.get("model"), ...JSON.parse(query.get("fields") ?? "{}") };
const headers = () => ({ "X-CSRFToken": document.cookie.match(/(?:^|; )csrftoken=([^;]+)/)?.[1] ?? "" });

function Chat({ messages }) {
  const chat = useWeather({ id, messages, headers, resume: true });
  return (
    <main>
      {chat.messages.map((message) => (
        <p key={message.id} className={message.role} data-id={message.id}>
          {message.parts.map((part, place) => part.type === "text" && <span key={place} className="text">{part.text}</span>)}
        </p>
      ))}
      <output>{chat.status}</output>
      <form action={(form) => chat.sendMessage({ text: form.get("question") }, { body })}>
        <input name="question" aria-label="Question" />
      </form>
    </main>
  );
}

fetch(`/ai/chat/${id}`)
  .then((response) => response.json())
  .then(({ messages }) => createRoot(document.getElementById("chat")).render(<Chat messages={messages} />));
