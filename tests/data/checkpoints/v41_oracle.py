# Slow fp32 whole-sequence DeepSeek-V4.1 text forward, written from a description of the architecture (NOT checked against official weights:
# transformers 5.24 has no V4.1).  Builds a tiny random checkpoint in official naming and stores logits for parity tests.
import os; os.environ["OMP_NUM_THREADS"]="1"
import torch, json, math, numpy as np; torch.set_num_threads(1)
from safetensors.torch import save_file
F=torch.nn.functional
import sys; D=sys.argv[1] if len(sys.argv)>1 else 'v41'   # folder to write
C=dict(model_type="deepseek_v41_text",vocab_size=512,hidden_size=64,moe_intermediate_size=32,num_hidden_layers=10,num_attention_heads=8,num_key_value_heads=1,
 head_dim=32,qk_rope_head_dim=8,q_lora_rank=24,o_lora_rank=16,o_groups=4,n_routed_experts=8,n_shared_experts=1,num_experts_per_tok=2,scoring_func="sqrtsoftplus",
 topk_method="noaux_tc",norm_topk_prob=True,routed_scaling_factor=1.5,swiglu_limit=0.8,rms_norm_eps=1e-20,sliding_window=16,max_position_embeddings=4096,rope_theta=10000,
 compress_rope_theta=160000,rope_scaling=dict(rope_type="yarn",factor=16,beta_fast=32,beta_slow=1,original_max_position_embeddings=64),
 compress_ratios=[0,2,2,2,1,1,1,1,1,0],kv_source_layer_ids=[1,3,4],index_source_layer_ids=[1,3,4,6,8],index_n_heads=16,index_head_dim=16,index_topk=24,
 candidate_source_layer_id=4,candidate_topk_blocks=10,candidate_block_size=8,hc_mult=4,hc_sinkhorn_iters=20,hc_eps=1e-6,
 engram_layer_ids=[1,3],engram_max_ngram_size=4,engram_vocab_size=50,engram_n_heads=2,engram_head_dim=32,engram_pad_token_id=2,engram_compressed_vocab_size=300,num_nextn_predict_layers=0)
def primes():
    seen=set(); out=[]
    isp=lambda n:n>1 and all(n%i for i in range(2,int(n**.5)+1))
    for _ in C['engram_layer_ids']:
        L=[]
        for _ in range(C['engram_max_ngram_size']-1):
            c=C['engram_vocab_size']-1
            for _ in range(C['engram_n_heads']):
                c+=1
                while not isp(c) or c in seen: c+=1
                seen.add(c); L.append(c)
        out.append(L)
    return out
PR=primes(); C['engram_num_embeddings']=[sum(p) for p in PR]
MUL=[(2*np.random.default_rng(10007*L).integers(0,max(1,(2**63-1)//C['engram_compressed_vocab_size']//2),size=C['engram_max_ngram_size'],dtype=np.int64)+1).tolist() for L in C['engram_layer_ids']]
g=torch.Generator().manual_seed(7); R=lambda *s:torch.randn(*s,generator=g)
TMAP=torch.cat((torch.arange(300),torch.randint(0,300,(212,),generator=g)))      # stand-in for the tokenizer-derived map
H,nh,hd,rd,win,n=C['hidden_size'],C['num_attention_heads'],C['head_dim'],C['qk_rope_head_dim'],C['sliding_window'],C['hc_mult']; E=C['n_routed_experts']; mi=C['moe_intermediate_size']
W={'embed.weight':R(512,H),'head.weight':R(512,H)/8,'norm.weight':1+.1*R(H)}
lin=lambda o,i:R(o,i)/i**.5
for L in range(C['num_hidden_layers']):
    p=f'layers.{L}.'; a=p+'attn.'; r=C['compress_ratios'][L]
    for s in ('attn','ffn'):
        W[p+f'hc_{s}_fn']=lin((2+n)*n,n*H); W[p+f'hc_{s}_base']=.5*R((2+n)*n); W[p+f'hc_{s}_scale']=1+.3*R(3); W[p+f'{s}_norm.weight']=1+.1*R(H)
    W|={a+'wq_a.weight':lin(24,H),a+'q_norm.weight':1+.1*R(24),a+'wq_b.weight':lin(nh*hd,24),a+'wkv.weight':lin(hd,H),a+'kv_norm.weight':1+.1*R(hd),a+'attn_sink':.5*R(nh),
        a+'wo_a.weight':lin(4*16,nh*hd//4),a+'wo_b.weight':lin(H,64)}
    if L in C['kv_source_layer_ids']:
        W|={a+'compressor.wkv.weight':lin(hd,H),a+'compressor.norm.weight':1+.1*R(hd),a+'indexer.wk.weight':lin(16,hd),a+'indexer.k_norm.weight':1+.1*R(16)}
        if r>1: W[a+'compressor.wgate.weight']=lin(hd,H)
    if L in C['index_source_layer_ids']: W|={a+'indexer.wq_b.weight':lin(256,24),a+'indexer.weights_proj.weight':lin(16,H)}
    if L in C['engram_layer_ids']:
        k=C['engram_layer_ids'].index(L); W|={p+'engram.embed.weight':R(C['engram_num_embeddings'][k],32),p+'engram.wkv.weight':lin(5*H,6*32),p+'engram.q_weight':1+.2*R(n,H),p+'engram.k_weight':1+.2*R(n,H)}
    W|={p+'ffn.gate.weight':lin(E,H),p+'ffn.gate.bias':.2*R(E)}
    for e in ['shared_experts']+[f'experts.{i}' for i in range(E)]: W|={p+f'ffn.{e}.w1.weight':lin(mi,H),p+f'ffn.{e}.w3.weight':lin(mi,H),p+f'ffn.{e}.w2.weight':lin(H,mi)}
eps=C['rms_norm_eps']
def rms(x,w=None):
    y=x*(x.square().mean(-1,keepdim=True)+eps).rsqrt(); return y if w is None else y*w
def freqs(base,yarn):
    f=base**(-torch.arange(0,rd,2).double()/rd)
    if yarn:
        y=C['rope_scaling']; Lm=y['original_max_position_embeddings']; cd=lambda r_: rd*math.log(Lm/(r_*2*math.pi))/(2*math.log(base))
        lo=max(math.floor(cd(y['beta_fast'])),0); hi=min(math.ceil(cd(y['beta_slow'])),rd-1); ramp=((torch.arange(rd//2).double()-lo)/max(hi-lo,1e-3)).clamp(0,1)
        f=f*(1-ramp)+f/y['factor']*ramp
    return f.float()
def rope(x,pos,f,sg=1):
    t=pos.float()[:,None]*f; sh=[x.shape[0]]+[1]*(x.dim()-2)+[rd//2]; c,s=t.cos().view(sh),sg*t.sin().view(sh)
    y=x[...,-rd:]; e,o=y[...,0::2],y[...,1::2]; return torch.cat((x[...,:-rd],torch.stack((e*c-o*s,o*c+e*s),-1).flatten(-2)),-1)
def attn(h,L,sh):
    p=f'layers.{L}.attn.'; S=h.shape[0]; pos=torch.arange(S); r=C['compress_ratios'][L]; f=freqs(C['compress_rope_theta'],True) if r else freqs(C['rope_theta'],False)
    qr=rms(h@W[p+'wq_a.weight'].T,W[p+'q_norm.weight']); q=rope((qr@W[p+'wq_b.weight'].T).view(S,nh,hd),pos,f)     # no per-head q norm in V4.1
    k=rope(rms(h@W[p+'wkv.weight'].T,W[p+'kv_norm.weight']),pos,f); dd=pos[:,None]-pos[None]; mask=(dd>=0)&(dd<win); keys=k
    if r:
        if L in C['kv_source_layer_ids']:
            m=S//r; kv=(h@W[p+'compressor.wkv.weight'].T)[:m*r].view(m,r,hd)
            lat=kv[:,0] if r==1 else (kv*(h@W[p+'compressor.wgate.weight'].T)[:m*r].view(m,r,hd).softmax(1)).sum(1)
            lat=rms(lat,W[p+'compressor.norm.weight']); sh['kv']=rope(lat,torch.arange(m)*r,f)
            sh['ik']=rope(rms(lat@W[p+'indexer.wk.weight'].T,W[p+'indexer.k_norm.weight']),torch.arange(m)*r,f)
        m=sh['kv'].shape[0]; vis=torch.arange(m)[None]<((pos+1)//r)[:,None]
        if L in C['index_source_layer_ids']:
            iq=rope((qr@W[p+'indexer.wq_b.weight'].T).view(S,16,16),pos,f); w=h@W[p+'indexer.weights_proj.weight'].T*(16**-.5*16**-.5)
            sc=(torch.einsum('shd,td->sht',iq,sh['ik']).relu()*w[...,None]).sum(1).masked_fill(~vis,-float('inf')); B=C['candidate_block_size']
            if L==C['candidate_source_layer_id']:
                nb=-(-m//B); bs=F.pad(sc,(0,nb*B-m),value=-float('inf')).view(S,nb,B).amax(-1); cnt=(pos+1)//r
                bs[pos[cnt>0],((cnt-1)//B)[cnt>0]]=float('inf'); v,i=bs.topk(min(C['candidate_topk_blocks'],nb),-1)
                keep=torch.zeros(S,nb,dtype=torch.bool).scatter_(1,i,v>-float('inf')); sh['cand']=keep.repeat_interleave(B,1)[:,:m]
            elif 0<=C['candidate_source_layer_id']<L: sc=sc.masked_fill(~sh['cand'],-float('inf'))
            v,i=sc.topk(min(C['index_topk'],m),-1); sh['sel']=torch.zeros_like(vis).scatter_(1,i,v>-float('inf'))
        keys=torch.cat((k,sh['kv'])); mask=torch.cat((mask,vis&sh['sel']),1)
    lg=(torch.einsum('shd,td->hst',q,keys)*hd**-.5).masked_fill(~mask[None],-float('inf'))
    pr=torch.cat((lg,W[p+'attn_sink'].view(nh,1,1).expand(nh,S,1)),-1).softmax(-1)[...,:-1]
    o=rope(torch.einsum('hst,td->shd',pr,keys),pos,f,-1).reshape(S,4,-1)
    return torch.einsum('sgd,grd->sgr',o,W[p+'wo_a.weight'].view(4,16,-1)).flatten(1)@W[p+'wo_b.weight'].T
def mlp(x,p):
    l=C['swiglu_limit']; return (F.silu((x@W[p+'w1.weight'].T).clamp(max=l))*(x@W[p+'w3.weight'].T).clamp(-l,l))@W[p+'w2.weight'].T
def moe(x,L):
    p=f'layers.{L}.ffn.'; s=F.softplus(x@W[p+'gate.weight'].T).sqrt(); i=(s+W[p+'gate.bias']).topk(C['num_experts_per_tok'],-1).indices
    w=s.gather(1,i); w=w/(w.sum(-1,keepdim=True)+1e-20)*C['routed_scaling_factor']; out=mlp(x,p+'shared_experts.')
    for e in range(E):
        t,j=(i==e).nonzero(as_tuple=True)
        if len(t): out.index_add_(0,t,w[t,j,None]*mlp(x[t],p+f'experts.{e}.'))
    return out
def engram(X,L,ids):
    k=C['engram_layer_ids'].index(L); p=f'layers.{L}.engram.'; S=len(ids); tid=TMAP[ids]; pad=int(TMAP[C['engram_pad_token_id']]); off=[0]+list(np.cumsum(PR[k]))[:-1]; cols=[]
    h=torch.zeros(S,dtype=torch.long); nhd=C['engram_n_heads']
    for s in range(C['engram_max_ngram_size']):
        sid=torch.full((S,),pad); sid[s:]=tid[:S-s] if s else tid; h=h^(sid*MUL[k][s])
        if s: cols+= [h%PR[k][(s-1)*nhd+j]+int(off[(s-1)*nhd+j]) for j in range(nhd)]
    kv=W[p+'embed.weight'][torch.stack(cols,1)].flatten(1)@W[p+'wkv.weight'].T; key=kv[:,:n*H].view(S,n,H); val=kv[:,n*H:]
    dot=(X*W[p+'q_weight']*W[p+'k_weight']*key).sum(-1)*(X.square().mean(-1)+eps).rsqrt()*(key.square().mean(-1)+eps).rsqrt()*H**-.5
    gate=(torch.where(dot<0,-1.,1.)*dot.abs().clamp(min=1e-6).sqrt()).sigmoid(); return X+gate[...,None]*val[:,None]
def mix(X,p):
    e=C['hc_eps']; m=rms(X.flatten(1))@W[p+'fn'].T; s,b=W[p+'scale'],W[p+'base']
    pre=(m[:,:n]*s[0]+b[:n]).sigmoid()+e; post=2*(m[:,n:2*n]*s[1]+b[n:2*n]).sigmoid(); c=(m[:,2*n:]*s[2]+b[2*n:]).view(-1,n,n).softmax(-1)+e; c=c/(c.sum(1,keepdim=True)+e)
    for _ in range(C['hc_sinkhorn_iters']-1): c=c/(c.sum(2,keepdim=True)+e); c=c/(c.sum(1,keepdim=True)+e)
    return pre,post,c
post_=lambda y,X,po,c: po[...,None]*y[:,None]+torch.einsum('sij,sid->sjd',c,X)
def model(ids):
    X=W['embed.weight'][ids][:,None].repeat(1,n,1); pre=torch.zeros(len(ids),n); pre[:,0]=1; sh={}
    for L in range(C['num_hidden_layers']):
        p=f'layers.{L}.'
        if L in C['engram_layer_ids']: X=engram(X,L,ids)
        for s,fn in (('attn',lambda x:attn(x,L,sh)),('ffn',lambda x:moe(x,L))):
            nxt,po,c=mix(X,p+f'hc_{s}_'); x=(pre[...,None]*X).sum(1); X=post_(fn(rms(x,W[p+f'{s}_norm.weight'])),X,po,c); pre=nxt
    return rms((pre[...,None]*X).sum(1),W['norm.weight'])@W['head.weight'].T
ids=torch.randint(0,512,(600,),generator=torch.Generator().manual_seed(3))
with torch.no_grad():
    full=model(ids); print('std',full.std().item(),'finite',bool(full.isfinite().all()))
    for t in (1,2,17,63,64,300,599):
        part=model(ids[:t]); print('prefix',t,'max diff',(part-full[:t]).abs().max().item())
cfg=dict(architectures=["DeepseekV41ForCausalLM"],model_type="deepseek_v41",bos_token_id=0,eos_token_id=1,pad_token_id=2,dtype="float32",image_token_id=500,text_config=C)
json.dump(cfg,open(D+'/config.json','w'),indent=1); save_file({k:v.contiguous() for k,v in W.items()},D+'/model.safetensors',metadata={'format':'pt'})
save_file(dict(ids=ids,logits=full.contiguous(),engram_token_map=TMAP,primes=torch.tensor(PR),multipliers=torch.tensor(MUL)),D+'/ref.safetensors'); print('params',sum(v.numel() for v in W.values()))
