package componentmetrics

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/node/kube"
)

// Reviewer returns a function for Server.Review, which asks the API server with the credential of the machine's kubelet. Nodes may
// ask for the user of a token and for the permissions of this user.
func Reviewer(client dynamic.Interface, node string) func(context.Context, string) error {
	return func(ctx context.Context, token string) error {
		answer, err := client.Resource(kube.TokenReviews).Create(ctx, review("authentication.k8s.io/v1", "TokenReview", map[string]any{"token": token}), metav1.CreateOptions{})
		if err != nil {
			return err
		}
		if known, _, _ := unstructured.NestedBool(answer.Object, "status", "authenticated"); !known {
			return ErrRefused
		}
		answer, err = client.Resource(kube.SubjectAccessReviews).Create(ctx, review("authorization.k8s.io/v1", "SubjectAccessReview", access(answer, node)), metav1.CreateOptions{})
		if err != nil {
			return err
		}
		if allowed, _, _ := unstructured.NestedBool(answer.Object, "status", "allowed"); !allowed {
			return ErrRefused
		}
		return nil
	}
}

// access returns the question whether the user of a TokenReview may get the metrics of the Node.
func access(token *unstructured.Unstructured, node string) map[string]any {
	spec := map[string]any{"resourceAttributes": map[string]any{"verb": "get", "resource": "nodes", "subresource": "metrics", "name": node}}
	user, _, _ := unstructured.NestedMap(token.Object, "status", "user")
	for from, to := range map[string]string{"username": "user", "groups": "groups", "uid": "uid", "extra": "extra"} {
		if value, found := user[from]; found {
			spec[to] = value
		}
	}
	return spec
}

func review(version, kind string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{"apiVersion": version, "kind": kind, "spec": spec}}
}
