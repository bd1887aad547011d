package addressclaim

import (
	"context"
	"errors"
	"fmt"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Only a refusal by the API server shows that it will not execute a request later.
func TestRefused(t *testing.T) {
	kind := schema.GroupResource{Resource: "ipaddresses"}
	tests := map[string]struct {
		err  error
		want bool
	}{
		"exists":            {apierrors.NewAlreadyExists(kind, "a"), true},
		"forbidden":         {fmt.Errorf("wrapped: %w", apierrors.NewForbidden(kind, "a", nil)), true},
		"too many requests": {apierrors.NewTooManyRequests("", 1), true},
		"timeout":           {apierrors.NewTimeoutError("", 1), false},
		"etcd is away":      {apierrors.NewServerTimeout(kind, "create", 1), false},
		"internal error":    {apierrors.NewInternalError(errors.New("x")), false},
		"cancelled":         {fmt.Errorf("post: %w", context.DeadlineExceeded), false},
		"connection":        {errors.New("connection reset by peer"), false},
	}
	for name, tt := range tests {
		if got := refused(tt.err); got != tt.want {
			t.Errorf("%s: got %v, want %v", name, got, tt.want)
		}
	}
}
