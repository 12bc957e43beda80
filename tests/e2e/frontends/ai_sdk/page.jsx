// A page that has all of `useChat` that the tests press: the query names the chat, and what its questions ask for.
import { useChat } from "@ai-sdk/react";
import { DefaultChatTransport, isToolUIPart, lastAssistantMessageIsCompleteWithApprovalResponses } from "ai";
import { useEffect } from "react";
import { createRoot } from "react-dom/client";

const query = new URLSearchParams(location.search);
const id = query.get("chat");
const body = { model: query.get("model"), ...JSON.parse(query.get("fields") ?? "{}") };
const token = () => document.cookie.match(/(?:^|; )csrftoken=([^;]+)/)?.[1] ?? "";
const headers = () => ({ "X-CSRFToken": token() });
const transport = new DefaultChatTransport({ api: "/ai/chat", headers, body });

function Part({ part, chat }) {
  if (part.type === "text") return <span className="text">{part.text}</span>;
  if (!isToolUIPart(part)) return null;
  const answer = (approved) => chat.addToolApprovalResponse({ id: part.approval.id, approved });
  return (
    <span className="tool" data-state={part.state}>
      {part.state === "approval-requested" && (
        <>
          {part.approval.requestReason}
          <button onClick={() => answer(true)}>Allow</button>
          <button onClick={() => answer(false)}>Refuse</button>
        </>
      )}
    </span>
  );
}

function Chat({ messages }) {
  const chat = useChat({
    id,
    messages,
    transport,
    resume: true,
    sendAutomaticallyWhen: lastAssistantMessageIsCompleteWithApprovalResponses,
  });
  useEffect(() => {
    const resume = () => void chat.resumeStream();
    addEventListener("online", resume);
    return () => removeEventListener("online", resume);
  }, [chat.resumeStream]);
  const last = chat.messages.at(-1);
  const stop = () => fetch(`/ai/chat/${id}/stop`, { method: "POST", headers: headers() });
  return (
    <main>
      {chat.messages.map((message) => (
        <p key={message.id} className={message.role} data-id={message.id}>
          {message.parts.map((part, place) => (
            <Part key={place} part={part} chat={chat} />
          ))}
        </p>
      ))}
      <output>{chat.status}</output>
      <form action={(form) => chat.sendMessage({ text: form.get("question") })}>
        <input name="question" aria-label="Question" />
      </form>
      <button onClick={stop}>Stop</button>
      <button onClick={() => chat.regenerate()}>Again</button>
      <button onClick={() => chat.sendMessage({ text: "changed", messageId: chat.messages.findLast((one) => one.role === "user").id })}>
        Change
      </button>
      <pre>{JSON.stringify(last?.metadata)}</pre>
    </main>
  );
}

fetch(`/ai/chat/${id}`)
  .then((response) => response.json())
  .then(({ messages }) => createRoot(document.getElementById("chat")).render(<Chat messages={messages} />));
