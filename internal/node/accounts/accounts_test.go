package accounts

import (
	"strings"
	"testing"
)

func TestComplete(t *testing.T) {
	old := "root:x:0:0:root:/root:/bin/sh\netcd:x:7:7::/:/bin/sh" // a user created etcd, and the last line has no newline
	got := string(Passwd([]byte(old)))
	if !strings.HasPrefix(got, old+"\n") || strings.Count(got, "etcd:x:") != 1 || !strings.Contains(got, "\nkube-apiserver:x:60701:60701::") {
		t.Errorf("%s", got)
	}
	if again := string(Passwd([]byte(got))); again != got {
		t.Errorf("the second call changed the file: %s", again)
	}
	if got := string(Group(nil)); !strings.HasPrefix(got, "etcd:x:60700:\n") {
		t.Errorf("%s", got)
	}
}
