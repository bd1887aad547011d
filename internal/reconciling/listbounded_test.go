package reconciling

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

func TestListBounded(t *testing.T) {
	c := fake.NewClientBuilder().Build()
	for n := range maxListed + 1 {
		if n == maxListed {
			if err := ListBounded(t.Context(), c, &corev1.ConfigMapList{}); err != nil {
				t.Fatalf("%d objects: %v", n, err)
			}
		}
		if err := c.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprint(n)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := ListBounded(t.Context(), c, &corev1.ConfigMapList{}); err == nil || !strings.Contains(err.Error(), "found 1001") {
		t.Errorf("one object more than allowed: %v", err)
	}
}
