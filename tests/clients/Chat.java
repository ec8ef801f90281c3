import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Asks with each version of HTTP that the JDK's client offers; prints the version, the status and the answer. */
public class Chat {
    public static void main(String[] arguments) throws Exception {
        URI chats = URI.create(arguments[0] + "/v1/chat/completions");
        HttpRequest request = HttpRequest.newBuilder(chats)
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(arguments[1]))
            .build();
        for (HttpClient.Version version : HttpClient.Version.values()) {
            HttpClient client = HttpClient.newBuilder().version(version).build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(version + "\t" + answer.statusCode() + "\t" + answer.body().replace("\n", "\\n"));
        }
    }
}
